"""Encoders after as many operations, in tiny."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.glue import compare_glue
from experiments.laboratory import Laboratory
from megahead.report.read import read_runs
from support.laboratory import TINY, results


def test_all_are_trained_to_the_plain_ones_operations_and_fine_tuned(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pairs = [(word, label) for word in ("man", "dog", "sea") for label in ("entailment", "not_entailment")]
    (tmp_path / "glue/RTE").mkdir(parents=True)
    rows = [f"{k}\ta {word}\tthe {word}\t{label}\n" for k, (word, label) in enumerate(pairs)]
    for part in ("train", "dev"):
        (tmp_path / f"glue/RTE/{part}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "".join(rows))
    for name, value in {"STEPS": 20, "PROBE_STEPS": 4, "SEEDS": 1}.items():
        monkeypatch.setattr(f"experiments.glue.{name}", value)
    settings = [part for part in TINY if "steps" not in part]
    settings += ["model.num_heads=2", "batch.micro_size=16", "training.log_seconds=0"]
    names = ["plain", "similar", "causal-50", "electra-headless", "electra-vanilla"]
    compare_glue(replace(laboratory, settings=settings), ["similar"])
    assert read_runs([laboratory.folder / "plain"])[0].metrics.training[-1]["step"] == 20  # whose nearest ids it has
    compare_glue(replace(laboratory, settings=settings, tasks_data=tmp_path), ["plain"])
    compare_glue(replace(laboratory, settings=settings, tasks_data=tmp_path), names)
    rows_of = {row["run"]: row for row in results(laboratory, "glue-runs")}
    assert [*rows_of] == names
    for name, row in rows_of.items():
        a_step = row["PFLOP"] / (row["tokens"] / 256)
        assert row["PFLOP"] == pytest.approx(rows_of["plain"]["PFLOP"], abs=a_step), name
        assert (row["kept"] is not None) == name.startswith("electra")
    assert rows_of["electra-headless"]["tokens"] < rows_of["plain"]["tokens"]
    kinds = [run.config["objective"] for run in read_runs([laboratory.folder / name for name in names])]
    assert [kind["name"] for kind in kinds] == [*["headless"] * 4, "vanilla"]
    assert [bool(kind["replaced_tokens"]) for kind in kinds] == [*[False] * 3, True, True]
    (scored,) = [row for row in results(laboratory, "glue") if row["task"] == "glue/rte"]
    assert {*names} < {*scored}
