"""lm-eval on local files equals what a by-hand evaluation of the same examples gives."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.data.tokenizer import load_tokenizer
from megahead.errors import CheckpointError, DataError, FieldError
from megahead.evaluate.harness import evaluate_tasks, fitting_batch_size
from megahead.evaluate.harness_tasks import task_files, task_rows
from megahead.hf.export import ensure_hf_folder
from megahead.hf.loading import load_causal, load_tokenizer_folder
from support.small_checkpoint import save_small, save_tokenizer, small_config

PASSAGES = ["the cat sat on the mat and the dog saw the cat", "the dog sat on the cat", "on the mat sat the dog"] * 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    return ensure_hf_folder(tmp_path / "run")


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    path = tmp_path / "cloze.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return path


@torch.no_grad()
def by_hand(folder: Path) -> tuple[float, float]:
    """(accuracy, perplexity) of last words, each passage by itself."""
    model, tokenizer = load_causal(folder), load_tokenizer_folder(folder)
    right, nats = 0, 0.0
    for text in PASSAGES:
        context, _, word = text.rpartition(" ")
        answer = tokenizer(" " + word)["input_ids"]
        ids = torch.tensor(tokenizer(context)["input_ids"] + answer)
        log_p = model(ids[None, :-1]).logits[0, -len(answer) :].log_softmax(-1)
        target = torch.tensor(answer)
        nats -= log_p.gather(1, target[:, None]).sum().item()
        right += bool((log_p.argmax(-1) == target).all())
    return right / len(PASSAGES), math.exp(nats / len(PASSAGES))


@pytest.mark.parametrize("behind", ["", " \n"])
def test_scores_equal_a_count_by_hand_and_carry_standard_errors(folder: Path, passages: Path, behind: str) -> None:
    passages.write_text("".join(json.dumps({"text": text + behind}) + "\n" for text in PASSAGES))
    (task,) = evaluate_tasks(folder, task_files(["cloze"], cloze=passages), batch_size=2)
    scores = {score.metric: score for score in task.scores}
    accuracy, perplexity = by_hand(folder)
    assert task.samples == len(PASSAGES)
    assert scores["acc"].value == pytest.approx(accuracy)
    assert scores["perplexity"].value == pytest.approx(perplexity, rel=1e-4)
    assert scores["acc"].stderr is not None
    assert scores["perplexity"].stderr is not None
    assert json.loads(json.dumps(asdict(task)))["task"] == "cloze"


def test_several_tasks_and_a_limit(folder: Path, passages: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "lambada").mkdir(parents=True)
    (tmp_path / "data" / "lambada" / "lambada_test.jsonl").write_bytes(passages.read_bytes())
    files = task_files(["lambada_openai", "cloze"], tmp_path / "data", passages)
    tasks = [*evaluate_tasks(folder, files, limit=2)]
    assert [(task.task, task.samples) for task in tasks] == [("lambada_openai", 2), ("cloze", 2)]
    assert tasks[0].scores[1].value == tasks[1].scores[1].value


def test_lambada_as_pythia_reads_it(shared_data: Path, tmp_path: Path) -> None:
    vocabulary = shared_data / "tokenizers" / "20B_tokenizer.json"
    save_small(tmp_path / "run", small_config(model={"vocab_size": 50277}, data={"tokenizer": str(vocabulary)}))
    folder = ensure_hf_folder(tmp_path / "run")
    files = task_files(["lambada_openai"], shared_data)
    text = files["lambada_openai"].read_text(encoding="utf-8")[:20000]
    assert load_tokenizer_folder(folder)(text)["input_ids"] == load_tokenizer(vocabulary).encode_batch([text])[0]
    (task,) = evaluate_tasks(folder, files, limit=3)
    assert task.samples == 3
    assert {score.metric for score in task.scores} == {"acc", "perplexity"}


def test_a_changed_file_of_the_same_name_is_read_anew(folder: Path, passages: Path) -> None:
    files = task_files(["cloze"], cloze=passages)
    (before,) = evaluate_tasks(folder, files)
    passages.write_text(json.dumps({"text": "the mat saw the dog"}) + "\n")
    (after,) = evaluate_tasks(folder, files)
    assert (before.samples, after.samples) == (len(PASSAGES), 1)


def test_a_model_without_its_tokenizer_is_reported(folder: Path, passages: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"must hold a tokenizer\.json"):
        next(evaluate_tasks(folder, task_files(["cloze"], cloze=passages)))


def test_mistakes_in_tasks_are_found_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"cloze, lambada_openai, .* but is lambda"):
        task_files(["lambda"])
    with pytest.raises(FieldError, match="`--cloze` must name the file"):
        task_files(["cloze"])
    with pytest.raises(FieldError, match=r"`--data` .*lambada_test\.jsonl"):
        task_files(["lambada_openai"])
    with pytest.raises(DataError, match=r"must hold lambada/lambada_test\.jsonl for task lambada_openai"):
        task_files(["lambada_openai"], tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty"),
        ('{"text": "a b"}\n{"text": " "}\n', "object 2 has none; leave it out"),
        ('{"text": "a b"}\n{"txt": "c"}\n', "line 2 is not"),
        ("[1]\n", "line 1 is not"),
    ],
)
def test_a_file_that_is_no_test_is_reported(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "cloze.jsonl").write_text(content)
    with pytest.raises(DataError, match=sentence):
        task_files(["cloze"], cloze=tmp_path / "cloze.jsonl")


def test_an_answer_longer_than_the_context_is_reported(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300, "max_positions": 32}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    (tmp_path / "cloze.jsonl").write_text(json.dumps({"text": f"the {'x' * 200}"}))
    files = task_files(["cloze"], cloze=tmp_path / "cloze.jsonl")
    with pytest.raises(DataError, match=r"cloze must have .* of at most 32 tokens, .* has one of 201; leave"):
        list(evaluate_tasks(ensure_hf_folder(tmp_path / "run"), files))


GOOD = {
    "boolq": {"passage": "a", "question": "b", "label": True},
    "arc": {"question": {"stem": "a", "choices": [{"text": "b", "label": "A"}]}, "answerKey": "A"},
    "race": {"article": "a", "questions": ["b"], "options": [["c"]], "answers": ["A"]},
    "piqa": {"goal": "a", "sol1": "b", "sol2": "c", "label": 0},
}


@pytest.mark.parametrize(
    ("reader", "wrong", "sentence"),
    [
        ("boolq", {"label": "yes"}, "its label must be true or false, but is 'yes'"),
        ("arc", {"question": {"stem": "a"}}, "lacks 'choices'"),
        ("race", {"answers": []}, "is of another form"),
        ("piqa", {"label": "sol1"}, "its label must be 0 or 1, but is 'sol1'"),
    ],
)
def test_an_example_that_is_not_as_published_is_named_by_its_number(
    tmp_path: Path, reader: str, wrong: dict[str, Any], sentence: str
) -> None:
    lines = [json.dumps(row) for row in (GOOD[reader], GOOD[reader] | wrong)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=f"must hold examples as published, but example 2 .*{sentence}"):
        task_rows({"arc": "arc_easy"}.get(reader, reader), tmp_path / "rows.jsonl")


def test_a_batch_shrinks_with_length_and_memory_and_never_vanishes(folder: Path) -> None:
    model, gigabyte = load_causal(folder), 1 << 30
    assert fitting_batch_size(model, 10, gigabyte) == 32
    long, longer = (fitting_batch_size(model, tokens, gigabyte // 8) for tokens in (1000, 2000))
    assert 1 < longer < long < 32
    assert fitting_batch_size(model, 9000, gigabyte // 8) == fitting_batch_size(model, 2048, gigabyte // 8)
    assert fitting_batch_size(model, 2000, 1) == 1
    model.config.hidden_size *= 64
    assert fitting_batch_size(model, 1000, gigabyte // 8) < long


def test_nothing_of_git_or_of_long_texts_reaches_the_terminal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # no repository
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"text": "the cat " * 3000 + "sat"}) + "\n")
    (task,) = evaluate_tasks(folder, task_files(["cloze"], cloze=file), batch_size=1)
    assert (task.samples, task.num_truncated) == (1, 1)
    assert task.truncation_note() == "cloze: 1 input longer than the limit, and truncated"
    said = "".join(capfd.readouterr())
    assert [part for part in ("fatal", "git", "Token indices", "indexing errors") if part in said] == []
