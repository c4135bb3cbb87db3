"""Runs with their embedding in rows: resumed, rolled back, gone on with dense, evaluated and exported as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.checkpoints.reading import Checkpoint, open_checkpoint
from megahead.config.objective import HeadName
from megahead.config.run import RunConfig
from megahead.data.writer import IndexedDatasetWriter
from megahead.distributed import tensors as blocks
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import DataError
from megahead.evaluate.perplexity import evaluate_checkpoint, evaluate_on_datasets
from megahead.hf.export import export
from megahead.hf.trained import TrainedModel
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.saved import save_checkpoint
from support.small_run import same_tensors, small_config, stage, write_text

ROWS = {"engine.embedding": "rows", "optimizer.eps": 1e-4, "data.sequence_length": 6}
"""Few tokens a step, so that rows are stale."""


def run(group: Group, config: RunConfig, resume: str) -> str:
    return pretrain(config, Launch(), resume).ending


def trained(folder: Path, ranks: int, changes: dict[str, Any], resume: str = "auto") -> Path:
    """A run's folder once it has ended."""
    config = small_config(folder, changes)
    assert on_ranks(ranks, run, config, resume) == ["finished"] * ranks
    return Path(config.folder())


@pytest.mark.parametrize(
    ("ranks", "number", "changes"),
    [
        (1, 0, {}),
        (2, 1, {"engine.precision": "bf16", "training.save_in_background": True}),
        long(2, 3, {"optimizer.table.rule": "adamw_row"}),
        long(2, 2, {"parallel.tensor": 2}),
        long(4, 2, {"parallel.tensor": 2}),
    ],
)
def test_a_resumed_run_equals_the_undisturbed_one_bitwise(
    tmp_path: Path, ranks: int, number: int, changes: dict[str, Any]
) -> None:
    write_text(tmp_path)
    changes = ROWS | stage(number) | changes
    whole = trained(tmp_path, ranks, changes | {"training.steps": 7})
    source = str(whole / "checkpoints/step-00000003")
    again = trained(tmp_path, ranks, changes | {"training.steps": 7, "output_dir": str(tmp_path / "again")}, source)
    assert same_tensors(whole, again)
    kept = open_checkpoint(whole)
    assert len(kept.tensors["late/weight/backbone.embedding.weight"].files()) == ranks
    assert "weight/backbone.embedding.weight" not in kept.tensors


def test_a_run_goes_on_dense_or_in_rows_on_any_mesh(tmp_path: Path) -> None:
    write_text(tmp_path)
    mixed = {"output_dir": str(tmp_path / "mixed"), "batch.micro_size": 2, **ROWS}
    for ranks, steps, kind, number in ((1, 3, "dense", 0), (2, 6, "rows", 1), (4, 9, "rows", 3), (2, 12, "dense", 2)):
        lengths = {"training.steps": steps, "schedule.name": "constant"}
        trained(tmp_path, ranks, mixed | lengths | stage(number) | {"engine.embedding": kind})
    straight = {**ROWS, "engine.embedding": "dense", "output_dir": str(tmp_path / "straight")}
    whole = trained(tmp_path, 1, straight | {"training.steps": 12, "schedule.name": "constant"})
    ours, reference = open_checkpoint(tmp_path / "mixed"), open_checkpoint(whole)
    for name in reference.tensors:
        torch.testing.assert_close(
            ours.read(name), reference.read(name), rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_other_settings_of_updates_hold_from_the_resume_on(tmp_path: Path) -> None:
    """Stale rows miss updates by the old ones."""
    write_text(tmp_path)
    kept = {}
    for kind in ("dense", "rows"):
        ours = ROWS | {"engine.embedding": kind, "schedule.name": "constant", "output_dir": str(tmp_path / kind)}
        trained(tmp_path, 1, ours | {"training.steps": 4, "optimizer.weight_decay": 20.0})
        allowed = {"optimizer.weight_decay": 0.0, "resume.allow": ["optimizer.weight_decay"]}
        kept[kind] = open_checkpoint(trained(tmp_path, 1, ours | {"training.steps": 6} | allowed))
    name = "weight/backbone.embedding.weight"
    torch.testing.assert_close(kept["rows"].read(name), kept["dense"].read(name), rtol=0, atol=1e-5)


def test_what_reads_a_checkpoint_reads_it_up_to_date(tmp_path: Path) -> None:
    """The model of a run in rows scores held-out text as the run did, and is the dense run's."""
    write_text(tmp_path)
    rows = trained(tmp_path, 2, ROWS)
    dense = trained(tmp_path, 2, ROWS | {"engine.embedding": "dense", "output_dir": str(tmp_path / "dense")})
    told, last = read_metrics(rows).validation[-1]["loss"], read_metrics(rows).training[-1]
    assert 12 <= last["rows_fetched"] < 48
    assert 0 < last["rows_late"] < 48
    assert "rows_late" not in read_metrics(dense).training[-1]
    assert evaluate_checkpoint(rows, "pmi").loss == pytest.approx(told, abs=1e-5)
    other = write_text(tmp_path, "other", documents=20, seed=1)
    both = evaluate_on_datasets(rows, "pmi", [tmp_path / "text", other])
    assert both == [evaluate_checkpoint(rows, "pmi"), evaluate_checkpoint(rows, "pmi", dataset=other)]
    assert both[0] != both[1]
    with IndexedDatasetWriter(tmp_path / "foreign", vocab_size=63) as writer:
        writer.add_document([*range(30, 63), 0])
    (tmp_path / "foreign.json").unlink()
    with pytest.raises(DataError, match="must hold ids below 60 only, but token 30 is 60"):
        evaluate_checkpoint(rows, "pmi", dataset=str(tmp_path / "foreign"))
    assert read_metrics(dense).validation[-1]["loss"] == pytest.approx(told, abs=1e-5)
    models = [TrainedModel.open(folder).load().state_dict() for folder in (rows, dense)]
    for name, weight in models[1].items():
        torch.testing.assert_close(models[0][name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("gpt_neox", "pmi"),
        ("llama", "tied"),
        ("llama", "none"),
        long("gpt_neox", "tied"),
        long("gpt_neox", "none"),
        long("llama", "pmi"),
    ],
)
def test_an_export_of_rows_is_that_of_the_same_weights_kept_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, head: HeadName
) -> None:
    """Byte for byte, read in several blocks."""
    write_text(tmp_path)
    rows = trained(tmp_path, 2, ROWS | {"model.family": family, "training.steps": 3})
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 20)
    dense = kept_dense(open_checkpoint(rows), tmp_path / "dense")
    ours, theirs = (export(run, run / "out", head).folder for run in (rows, dense))
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert (ours / "config.json").read_bytes() == (theirs / "config.json").read_bytes()


def kept_dense(checkpoint: Checkpoint, run: Path) -> Path:
    """A run folder with the same checkpoint, its embedding stored as a dense run stores it."""
    tensors = {n: checkpoint.read(n) for n in checkpoint.names() if not n.startswith("late/")}
    config = checkpoint.config | {"engine": checkpoint.config["engine"] | {"embedding": "dense"}}
    root, state = run / "checkpoints", checkpoint.state
    save_checkpoint(root, checkpoint.step, tensors.items(), state=state, config=config, group=Group())
    return run


def test_a_run_starts_from_the_weights_of_one_in_rows(tmp_path: Path) -> None:
    """A vanilla head, started as a copy of the embedding; and rows of rows."""
    write_text(tmp_path)
    source = trained(tmp_path, 2, ROWS)
    embedding = open_checkpoint(source).read("weight/backbone.embedding.weight")
    vanilla = {"objective.name": "vanilla", "init.from_checkpoint": str(source), "optimizer.learning_rate": 1e-12}
    head = trained(tmp_path, 1, vanilla | {"training.steps": 2, "output_dir": str(tmp_path / "head")})
    torch.testing.assert_close(open_checkpoint(head).read("weight/head.weight"), embedding, rtol=0, atol=1e-6)
    more = {"init.from_checkpoint": str(source), "init.mode": "continue", "optimizer.learning_rate": 1e-12}
    again = trained(tmp_path, 2, ROWS | more | {"training.steps": 2, "output_dir": str(tmp_path / "more")})
    found = open_checkpoint(again).read("weight/backbone.embedding.weight")
    torch.testing.assert_close(found, embedding, rtol=0, atol=1e-6)
