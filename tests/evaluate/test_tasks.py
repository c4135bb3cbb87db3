"""Published files reach lm-eval's own definitions with the right answer; real ones hold all their examples."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from megahead.errors import DataError
from megahead.evaluate.harness_tasks import (
    TASKS,
    read_crows_pairs,
    read_similarities,
    task_files,
    task_rows,
    write_tasks,
)

QUESTION = {"stem": "Why?", "choices": [{"text": "so", "label": "A"}, {"text": "thus", "label": "B"}]}
PUBLISHED: dict[str, Any] = {
    "arc_easy": [{"id": "x", "question": QUESTION, "answerKey": "B"}],
    "boolq": [{"question": "is it", "passage": "It is.", "idx": 3, "label": "true"}],
    "race": [
        {
            "article": 'It\'s "long".',
            "questions": ["One   _  .", "Two?"],
            "options": [["a", "b", "c", "d"], ["e", "f", "g", "h"]],
            "answers": ["B", "C"],
        }
    ],
    "sciq": [
        {"support": "", "question": "Who?", "distractor1": "a", "distractor2": "b", "distractor3": "c"}
        | {"correct_answer": "darwin"}
    ],
    "piqa": [{"goal": "g", "sol1": "left", "sol2": "right", "label": "1"}],
    "openbookqa": [{"question_stem": "s", "choices": {"text": ["p", "q"], "label": ["A", "B"]}, "answerKey": "B"}],
}
RIGHT = {"arc_easy": "thus", "boolq": "yes", "race": "g", "sciq": "darwin", "piqa": "right", "openbookqa": "q"}


def put(data: Path, task: str, text: str) -> Path:
    file = data / str(TASKS[task].file) / ("ori_pqal.json" if task == "pubmedqa" else "")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def shipped(files: dict[str, Path], folder: Path) -> dict[str, Any]:
    """The tasks as lm-eval builds them."""
    manager = TaskManager(include_path=str(write_tasks(files, folder)), include_defaults=False)
    return dict(manager.load(list(files))["tasks"])


def test_the_right_answer_is_what_lm_eval_takes_for_right(tmp_path: Path) -> None:
    for task, rows in PUBLISHED.items():
        put(tmp_path, task, "".join(json.dumps(row) + "\n" for row in rows))
    for name, task in shipped(task_files(list(PUBLISHED), tmp_path), tmp_path / "made").items():
        (document,) = task.eval_docs
        target = task.doc_to_target(document)
        right = task.doc_to_choice(document)[target] if isinstance(target, int) else target
        assert right == RIGHT[name], name


def test_articles_of_the_pubmedqa_test_set_only(tmp_path: Path) -> None:
    article = {"QUESTION": "Does it?", "CONTEXTS": ["One.", "Two."], "final_decision": "no", "YEAR": "2010"}
    file = put(tmp_path, "pubmedqa", json.dumps({"1": article, "2": {**article, "final_decision": "maybe"}}))
    file.with_name("test_ground_truth.json").write_text(json.dumps({"2": "maybe"}))
    (task,) = shipped(task_files(["pubmedqa"], tmp_path), tmp_path / "made").values()
    (document,) = task.eval_docs
    assert task.doc_to_text(document) == "Abstract: One.\nTwo.\nQuestion: Does it?\nAnswer:"
    assert task.doc_to_target(document) == "maybe"


def test_questions_of_qasper_are_those_answered_by_yes_or_no(tmp_path: Path) -> None:
    def answer(yes_no: bool | None, text: str) -> dict[str, Any]:
        blob = {"unanswerable": False, "extractive_spans": [], "yes_no": yes_no, "free_form_answer": text}
        return {"answer": blob, "annotation_id": "a"}

    asked = [
        {"question": "Is it?", "answers": [answer(False, "")]},
        {"question": "What?", "answers": [answer(None, "that")]},
    ]
    paper = {"title": "T", "abstract": "A", "full_text": [], "qas": asked}
    put(tmp_path, "qasper_bool", json.dumps({"1909.00001": paper}))
    (task,) = shipped(task_files(["qasper_bool"], tmp_path), tmp_path / "made").values()
    assert [task.doc_to_text(document) for document in task.eval_docs] == ["TITLE: T\nABSTRACT: A\n\nQ: Is it?\n\nA:"]


def test_sentences_of_a_csv_keep_their_commas_and_line_breaks(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["", "sent_more", "sent_less", "stereo_antistereo", "bias_type"])
        writer.writerow([0, 'Poor, "they"\nsaid', "Rich", "stereo", "age"])
    (row,) = task_rows("crows_pairs_english", file)
    assert row == {"sent_more": 'Poor, "they"\nsaid', "sent_less": "Rich", "bias_type": "age"}


@pytest.mark.parametrize(
    ("task", "content", "sentence"),
    [
        (
            "boolq",
            '{"question": "q", "passage": "p", "label": "perhaps"}',
            "must hold examples as published, but example 1",
        ),
        ("arc_easy", '{"question": "q", "answerKey": "A"}', "must hold examples as published, but example 1"),
        ("pubmedqa", "[]", "one JSON object of examples"),
        ("qasper_bool", '{"1": {"title": "t"}}', "must hold examples as published, but example 1"),
        ("crows_pairs_english", "a,b\n1,2\n", "lacks one"),
        ("sciq", '{"question": "q"}', "JSON objects with a `support`, but line 1 is not"),
        ("boolq", '{"question": "q", "passage": null, "label": true}', "with a `passage`, but line 1 is not"),
    ],
)
def test_a_file_of_another_form_is_reported(tmp_path: Path, task: str, content: str, sentence: str) -> None:
    put(tmp_path, task, content)
    with pytest.raises(DataError, match=sentence):
        task_files([task], tmp_path)


def test_data_that_is_not_at_hand_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold eval/qasper/qasper-test-v0\.3\.json for task qasper_bool"):
        task_files(["qasper_bool"], tmp_path)


def test_real_files_hold_as_many_examples_as_published(shared_data: Path) -> None:
    counts = {
        "lambada_openai": 5153,
        "arc_easy": 2376,
        "arc_challenge": 1172,
        "boolq": 3270,
        "crows_pairs_english": 1508,
        "race": 1045,
        "sciq": 1000,
        "pubmedqa": 500,
    }
    for task, file in task_files(list(counts), shared_data).items():
        assert len(task_rows(task, file)) == counts[task], task


def test_a_sentence_may_contain_other_line_separators_than_a_line_break(tmp_path: Path) -> None:
    sentence = "A cat\u2028sat\x85 and\x0cslept."
    (tmp_path / "dev.tsv").write_text(f"sentence1\tsentence2\tscore\n{sentence}\tA dog.\t2.5\n", encoding="utf-8")
    assert read_similarities(tmp_path / "dev.tsv", None) == [
        {"sentence1": sentence, "sentence2": "A dog.", "score": 2.5}
    ]
    content = f'"","sent_more","sent_less","bias_type"\n0,"{sentence}","A dog.",age\n'
    (tmp_path / "pairs.csv").write_text(content, encoding="utf-8")
    assert read_crows_pairs(tmp_path / "pairs.csv") == [
        {"sent_more": sentence, "sent_less": "A dog.", "bias_type": "age"}
    ]
