"""Published rows become examples with the right label; halves keep together what belongs together."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megahead.errors import DataError, FieldError
from megahead.evaluate.glue_tasks import TASKS, Example, expand_task_names, has_task, load_task

CB = {"premise": "It rained.", "hypothesis": "It was wet.", "label": "contradiction", "idx": 0}
COPA = {"premise": "I ran.", "choice1": "I was late.", "choice2": "I sat.", "question": "cause", "label": 1}
WIC = {"word": "bank", "sentence1": "A bank.", "sentence2": "The banks.", "label": True, "start1": 2}


def put(data: Path, name: str, text: str) -> None:
    (data / name).parent.mkdir(parents=True, exist_ok=True)
    (data / name).write_text(text, encoding="utf-8")


def put_lines(data: Path, folder: str, *rows: dict[str, Any]) -> None:
    for split in ("train", "val"):
        put(data, f"superglue/{folder}/{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def test_examples_of_every_form(tmp_path: Path) -> None:
    sources = tmp_path
    put(tmp_path, "glue/CoLA/train.tsv", "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tRode the.\n")
    put(tmp_path, "glue/CoLA/dev.tsv", 'gj04\t1\t\tHe said "yes.\r\n')
    put(tmp_path, "glue/MRPC/train.tsv", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tOne \tTwo\n")
    put(tmp_path, "glue/MRPC/dev.tsv", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\tOne\tTwo\n")
    put_lines(tmp_path, "CB", CB)
    put_lines(tmp_path, "COPA", COPA)
    put_lines(tmp_path, "WiC", WIC)
    cola = load_task("glue/cola", sources)
    assert cola.train == [Example("The sailors rode.", (None,), 1), Example("Rode the.", (None,), 0)]
    assert cola.evaluation_sets == {"cola": [Example('He said "yes.', (None,), 1)]}
    assert load_task("glue/mrpc", sources).train == [Example("One ", ("Two",), 1)]
    assert load_task("superglue/cb", sources).train == [Example("It rained.", ("It was wet.",), 1)]
    copa = Example("I ran. What was the cause of this?", ("I was late.", "I sat."), 1)
    assert load_task("superglue/copa", sources).train == [copa]
    assert load_task("superglue/wic", sources).train == [Example("bank: A bank.", ("The banks.",), 1)]
    assert expand_task_names(["glue", "superglue/cb", "superglue"], sources) == [
        "glue/cola",
        "glue/mrpc",
        "superglue/cb",
        "superglue/copa",
        "superglue/wic",
    ]


def test_both_dev_sets_of_mnli_are_one(tmp_path: Path) -> None:
    header = "index\tsentence1\tsentence2\tlabel1\tgold_label\n"
    for split, label in (("train", "neutral"), ("dev_matched", "entailment"), ("dev_mismatched", "contradiction")):
        put(tmp_path, f"glue/MNLI/{split}.tsv", f"{header}0\tOf {split}\tB\t-\t{label}\n")
    data = load_task("glue/mnli", tmp_path)
    assert [example.first_text for example in data.train] == ["Of train"]
    (rows,) = data.evaluation_sets.values()
    assert [(example.first_text, TASKS["glue/mnli"].labels[int(example.label)]) for example in rows] == [
        ("Of dev_matched", "entailment"),
        ("Of dev_mismatched", "contradiction"),
    ]
    (tmp_path / "glue/MNLI/dev_mismatched.tsv").unlink()
    assert not has_task(tmp_path, "glue/mnli")


def test_words_in_context_in_their_first_form_where_the_other_lacks_training(tmp_path: Path) -> None:
    put_lines(tmp_path, "WiC", WIC)
    (tmp_path / "superglue/WiC/train.jsonl").unlink()
    for split in ("train", "dev"):
        put(tmp_path, f"superglue/WiC/{split}/{split}.data.txt", "go\tV\t0-0\tGo !\tThey go .\n")
        put(tmp_path, f"superglue/WiC/{split}/{split}.gold.txt", "T\n")
    data = load_task("superglue/wic", tmp_path)
    assert data.train == data.evaluation_sets["wic"] == [Example("go: Go !", ("They go .",), 1)]


def test_halves_of_xnli_share_no_premise_and_are_the_same_rows_in_all_languages(tmp_path: Path) -> None:
    labels = ["neutral", "contradiction", "entailment"]
    for language in ("en", "fr"):
        rows = [f"{language} {k // 3}\t{language} {k}\t{labels[k % 3]}\n" for k in range(12)]
        put(tmp_path, f"xnli/dev-{language}.tsv", "".join(rows))
    data = load_task("xnli/fr", tmp_path)
    assert data.trains_on_dev
    assert list(data.evaluation_sets) == ["fr", "en"]
    assert not {example.first_text for example in data.train} & {
        example.first_text for example in data.evaluation_sets["fr"]
    }
    assert [e.second_texts[0] for e in data.train] == ["fr 0", "fr 1", "fr 2", "fr 6", "fr 7", "fr 8"]
    assert [e.second_texts[0] for e in data.evaluation_sets["en"]] == ["en 3", "en 4", "en 5", "en 9", "en 10", "en 11"]
    assert [e.label for e in data.train] == [1, 2, 0, 1, 2, 0]
    put(tmp_path, "xnli/multinli.train.fr.tsv", "premise\thypo\tlabel\nA\tB\tcontradictory\n")
    whole = load_task("xnli/fr", tmp_path, languages=["fr"])
    assert (whole.trains_on_dev, whole.train, list(whole.evaluation_sets)) == (False, [Example("A", ("B",), 2)], ["fr"])
    assert len(whole.evaluation_sets["fr"]) == 12
    put(tmp_path, "xnli/multinli.train.en.tsv", "not as published, and not read\n")
    assert list(load_task("xnli/fr", tmp_path).evaluation_sets) == ["fr", "en"]
    (tmp_path / "xnli/multinli.train.en.tsv").unlink()
    languages = {name: load_task(f"xnli/{name}", tmp_path) for name in ("fr", "en")}
    assert {name: len([*rows]) for name, rows in languages["fr"].evaluation_sets.items()} == {"fr": 12, "en": 12}
    premises = {example.first_text[3:] for example in languages["en"].train}
    assert languages["en"].trains_on_dev
    assert not premises & {example.first_text[3:] for example in languages["en"].evaluation_sets["fr"]}


def test_fewer_rows_are_the_same_ones_every_time(tmp_path: Path) -> None:
    put_lines(tmp_path, "CB", *({**CB, "premise": str(k)} for k in range(50)))
    first, again = (load_task("superglue/cb", tmp_path, max_train_rows=10) for _ in range(2))
    assert first.train == again.train
    assert first.fingerprint == again.fingerprint
    assert len({example.first_text for example in first.train}) == 10
    assert len(first.evaluation_sets["cb"]) == 50
    assert first.fingerprint != load_task("superglue/cb", tmp_path, max_train_rows=11).fingerprint


def test_the_hub_gives_the_same_examples_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the hub's repository in a folder of its name, with its numbered labels."""
    put_lines(tmp_path, "CB", CB)
    row = json.dumps({**CB, "label": 1})
    card = "---\nconfigs:\n- config_name: cb\n  data_files:\n  - {split: train, path: t.jsonl}\n"
    put(tmp_path, "hub/aps/super_glue/README.md", f"{card}  - {{split: validation, path: v.jsonl}}\n---\n")
    for name in ("t", "v"):
        put(tmp_path, f"hub/aps/super_glue/{name}.jsonl", f"{row}\n")
    monkeypatch.chdir(tmp_path / "hub")
    from_hub = load_task("superglue/cb", None)
    assert from_hub == load_task("superglue/cb", tmp_path)


def test_lines_that_lack_columns_are_left_out_and_counted(tmp_path: Path) -> None:
    """QQP as published: a question with a line break in it has become two lines, of which neither has all columns."""
    header, row = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n", "1\t2\t3\tWhy {}?\tWhy so?\t1\n"
    broken = "4\t5\t6\tWhy not\nat all?\tWhy?\t0\n"
    put(tmp_path, "glue/QQP/train.tsv", header + row.format("me") + broken + row.format("you") + row.format("us"))
    put(tmp_path, "glue/QQP/dev.tsv", header + row.format("now"))
    data = load_task("glue/qqp", tmp_path)
    assert [example.first_text for example in data.train] == ["Why me?", "Why you?", "Why us?"]
    assert (data.num_skipped, len(data.evaluation_sets["qqp"])) == (2, 1)
    put(tmp_path, "glue/QQP/dev.tsv", header + row.format("now") * 2 + "7\t8\n")
    assert load_task("glue/qqp", tmp_path).num_skipped == 3


@pytest.mark.parametrize(
    ("name", "file", "content", "sentence"),
    [
        (
            "glue/rte",
            "glue/RTE/dev.tsv",
            "index\tsentence1\n0\tx\n",
            "must begin with tab-separated columns sentence1, sen",
        ),
        (
            "glue/rte",
            "glue/RTE/dev.tsv",
            "sentence1\tsentence2\tlabel\nx\nx\ny\tz\tentailment\n",
            "but 2 of 3 lines lack",
        ),
        (
            "xnli/fr",
            "xnli/dev-fr.tsv",
            "a\tb\tneutral\n" * 5 + "a\tb\n",
            "have all columns to be cut in halves, but lack one in 1 lines",
        ),
        (
            "glue/rte",
            "glue/RTE/dev.tsv",
            "sentence1\tsentence2\tlabel\nx\ty\tentailment\nx\ty\tperhaps\n",
            r"`glue/RTE/dev\.tsv` must hold glue/rte as published \(texts, and labels of entailment, not_entailment\), "
            r"but example 2 is .*'perhaps'",
        ),
        ("glue/stsb", "glue/STS-B/dev.tsv", "sentence1\tsentence2\tscore\nx\ty\thigh\n", "labels of numbers.*'high'"),
        (
            "superglue/boolq",
            "superglue/BoolQ/val.jsonl",
            '{"question": 3, "passage": "x", "label": true}\n',
            "labels of false, true.*example 1 is .*'question': 3",
        ),
        (
            "superglue/copa",
            "superglue/COPA/val.jsonl",
            json.dumps({**COPA, "question": "why"}) + "\n",
            "example 1 is .*'question': 'why'",
        ),
        (
            "superglue/cb",
            "superglue/CB/val.jsonl",
            json.dumps({**CB, "label": None}) + "\n",
            "JSON objects with a `label`, but line 1",
        ),
        (
            "glue/rte",
            "glue/RTE/dev.tsv",
            "sentence1\tsentence2\tlabel\nx\ty\tentailment\n",
            "cut in halves, but hold 1",
        ),
        ("glue/rte", "glue/RTE/dev.tsv", "sentence1\tsentence2\tlabel\n", "one of them is empty"),
        ("superglue/cb", "superglue/CB/val.jsonl", '{"premise": "x"}\n', "JSON objects with a `hypothesis`"),
        ("glue/sst2", "glue/RTE/dev.tsv", "x", r"must hold glue/SST-2/dev\.tsv for task glue/sst2"),
    ],
)
def test_files_of_another_form_are_reported(tmp_path: Path, name: str, file: str, content: str, sentence: str) -> None:
    put(tmp_path, file, content)
    with pytest.raises(DataError, match=sentence):
        load_task(name, tmp_path)


def test_unknown_tasks_and_a_hub_out_of_reach_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        FieldError, match=r"`--task` must name tasks of glue/cola, .*xnli/LANGUAGE, but is glue/cole.*`glue/cola`\?$"
    ):
        expand_task_names(["glue/cole"], tmp_path)
    (tmp_path / "nyu-mll/glue").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError,
        match=r"cannot be loaded from the Hugging Face hub: .*; download the files and name their folder with `--data`",
    ):
        load_task("glue/cola", None)


def test_real_files_are_read_whole(shared_data: Path) -> None:
    sources = shared_data
    counts = {
        "glue/cola": (8551, 1043),
        "glue/sst2": (67349, 872),
        "glue/mrpc": (3667, 408),
        "glue/stsb": (5749, 1500),
        "glue/qnli": (2732, 2731),
        "glue/rte": (2490, 277),
        "glue/wnli": (635, 71),
        "superglue/boolq": (9427, 3270),
        "superglue/cb": (250, 56),
        "superglue/copa": (400, 100),
        "superglue/wic": (5428, 638),
        "xnli/th": (1245, 1245),
    }
    assert expand_task_names(["glue", "superglue"], sources) == list(counts)[:-1]
    for name, (train, test) in counts.items():
        data = load_task(name, sources, languages=["en"])
        assert (len(data.train), len(next(iter(data.evaluation_sets.values())))) == (train, test), name
        if TASKS[name].labels:
            assert set(Counter(example.label for example in data.train)) == set(range(len(TASKS[name].labels)))


def test_a_label_of_words_in_context_that_is_unknown_is_named(tmp_path: Path) -> None:
    put(tmp_path, "superglue/WiC/dev/dev.data.txt", "go\tV\t0-0\tGo !\tThey go .\n")
    put(tmp_path, "superglue/WiC/dev/dev.gold.txt", "X\n")
    with pytest.raises(DataError, match=r"labels of false, true.*example 1 is .*'label': 'X'"):
        load_task("superglue/wic", tmp_path)
