"""The fine-tuning command: one table, a JSON beside it, mistakes told in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megahead.commands import finetune, report_once
from megahead.distributed.group import Group
from megahead.errors import FieldError
from support.on_ranks import on_ranks
from support.small_encoder import save_small_encoder

XNLI = "the cat sat\tit is true\tentailment\nthe cat sat\tno\tcontradiction\nthe cat sat\tthe dog\tneutral\n"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A model, and the data of three tasks."""
    rows = [{"premise": "the cat sat", "hypothesis": "it is true", "label": "entailment"}] * 9
    for split in ("train", "val"):
        file = tmp_path / f"data/superglue/CB/{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data/glue/RTE").mkdir(parents=True)
    for split, more in (("train", "8\tIt rained,\nmostly.\tWet.\tentailment\n"), ("dev", "")):
        rows = "index\tsentence1\tsentence2\tlabel\n" + "7\tthe cat sat\tit is true\tentailment\n" * 9
        (tmp_path / f"data/glue/RTE/{split}.tsv").write_text(rows + more)
    (tmp_path / "data/xnli").mkdir()
    for language in ("en", "fr", "de"):
        (tmp_path / f"data/xnli/dev-{language}.tsv").write_text(XNLI * 4)
    model = save_small_encoder(tmp_path / "model")
    return ["--model", str(model), "--data", str(tmp_path / "data"), "--output", str(tmp_path / "scores.json")]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["finetune.py", *arguments])
    finetune.main()


def test_a_table_of_models_tasks_and_languages(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    chosen = ["--task", "superglue", "xnli/fr", "--languages", "fr,en", "--seeds", "2", "--epochs", "1", "--floor"]
    run(monkeypatch, *arguments, *chosen, "--learning-rate", "0.01", "--batch-size", "3")
    lines = capsys.readouterr().out.splitlines()
    title = next(k for k, line in enumerate(lines) if line.startswith("percent"))
    assert len(lines[:title]) == 8  # two models x two tasks x two seeds, an epoch each
    assert lines[title + 1].rstrip().endswith("random weights")
    cb, fr, en, mean = (line.split() for line in lines[title + 2 :] if "accuracy" in line)
    assert cb[:2] == ["superglue/cb", "accuracy"]
    assert cb[2:7] == ["100.0", "±", "0.0", "(1", "1)"]
    assert fr[:5] == ["xnli/fr", "(half", "of", "dev)", "accuracy"]
    assert (en[4], mean[4:7]) == ("en", ["mean", "of", "2"])
    entries = json.loads((tmp_path / "scores.json").read_text())["results"]
    assert [(entry["model"], entry["task"], entry["seed"]) for entry in entries[4:6]] == [
        ("random weights", "superglue/cb", 0),
        ("random weights", "superglue/cb", 1),
    ]
    assert list(entries[-1]["epochs"][0]["scores"]) == ["fr", "en"]


def finetune_glue(group: Group, arguments: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(FieldError) as raised:
        run(patch, *arguments, "--task", "glue/rte")
    return str(raised.value)


def test_several_ranks_tune_on_pairs_alone(arguments: list[str]) -> None:
    sentence = "`--task` must be retrieval/PATH on several ranks, but is glue/rte instead."
    assert on_ranks(2, finetune_glue, arguments) == [sentence] * 2


def test_lines_that_were_left_out_are_reported(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, *arguments, "--task", "glue/rte", "superglue/cb", "--seeds", "1", "--epochs", "1")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "left out" in line] == ["glue/rte: 2 lines lack a column and were left out"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--task", "cb"], "`--task` must name tasks of glue/cola"),
        (["--task", "xnli/fr", "--languages", "fr,xx"], r"`--languages` must name languages of en, .*, but is xx"),
        (["--task", "superglue/cb", "--epochs", "0"], "`--epochs` must be above 0"),
        (["--task", "superglue/cb", "--learning-rate", "inf"], "`--learning-rate` must be a finite number, but is inf"),
        (["--task", "xnli/fr", "--learning-rate", "nan"], "`--learning-rate` must be a finite number, but is nan"),
        (["--task", "superglue/cb", "--weight-decay", "nan"], "`--weight-decay` must be a finite number, but is nan"),
        (["--task", "superglue/cb", "--seeds", "0"], "`--seeds` must be at least 1"),
    ],
)
def test_mistakes_are_reported(
    arguments: list[str], given: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FieldError, match=sentence):
        run(monkeypatch, *arguments, *given)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_an_error_ends_any_launchers_ranks_at_once(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(finetune, "run_command", lambda _, **options: calls.append(options))
    monkeypatch.setenv(variable, "2")
    finetune.main()
    assert calls == [{"immediate_exit": True, "report": report_once}]
