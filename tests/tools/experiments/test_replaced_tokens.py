"""Replaced-token detection beside the plain objective, in tiny."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.laboratory import Laboratory
from experiments.replaced_tokens import compare_replaced_tokens
from megahead.report import read_runs
from support.laboratory import TINY, results


def test_both_generators_are_held_against_the_plain_encoder_at_equal_tokens_and_operations(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pairs = [(word, label) for word in ("man", "dog", "sea") for label in ("entailment", "not_entailment")]
    (tmp_path / "glue/RTE").mkdir(parents=True)
    rows = [f"{k}\ta {word}\tthe {word}\t{label}\n" for k, (word, label) in enumerate(pairs)]
    for part in ("train", "dev"):
        (tmp_path / f"glue/RTE/{part}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "".join(rows))
    monkeypatch.setattr("experiments.replaced_tokens.STEPS", 20)
    monkeypatch.setattr("experiments.replaced_tokens.SEEDS", 1)
    settings = [part for part in TINY if "steps" not in part]
    tiny = replace(laboratory, settings=[*settings, "model.num_heads=2", "batch.micro_size=16"], tasks_data=tmp_path)
    compare_replaced_tokens(tiny, [])
    rows_of = {(row["run"], row["at equal"]): row for row in results(laboratory, "replaced_tokens")}
    plain = rows_of.pop(("headless", "tokens"))
    names = ("electra-headless", "electra-vanilla")
    assert {*rows_of} == {(name, equal) for name in names for equal in ("tokens", "operations")}
    for (name, equal), row in rows_of.items():
        measure = "PFLOP" if equal == "operations" else "tokens"
        a_step = row[measure] / (row["tokens"] / 256)
        assert row[measure] == pytest.approx(plain[measure], abs=0.51 * a_step), name
        assert row["kept"] is not None
    kinds = {run.name: run.config["objective"] for run in read_runs([tiny.folder / f"{name}-tokens" for name in names])}
    assert [kinds[f"{name}-tokens"]["name"] for name in names] == ["headless", "vanilla"]
    assert all(kind["replaced_tokens"] for kind in kinds.values())
    (scored,) = [row for row in results(laboratory, "replaced_tokens-glue") if row["task"] == "glue/rte"]
    assert len([column for column in scored if column.startswith("electra-")]) == 4
