"""No rank ever holds the whole table: not when a run starts, resumes or begins from another, nor when it is exported.

The table is 64 MiB, read in blocks of 1 MiB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megahead.checkpoints.reading import Checkpoint, open_checkpoint
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.distributed import tensors as blocks
from megahead.distributed.group import Group, Mesh
from megahead.distributed.launch import Launch
from megahead.engine.engine import Engine
from megahead.hf import verify
from megahead.hf.export import export
from megahead.hf.trained import TrainedModel
from megahead.train.run import build_engine, pretrain
from megahead.train.start import starting_weights
from support.forked import forked
from support.long import long
from support.on_ranks import on_ranks
from support.peaks import measures_peaks, peak_above
from support.small_engine import CPU
from support.small_run import small_config, write_text

TABLE = 64 * 2**20
LARGE = {"model.vocab_size": 2**18, "model.hidden_size": 64, "data.validation": None, "training.steps": 2}


def large(folder: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    return small_config(folder, LARGE | (changes or {}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two ranks."""
    folder = tmp_path_factory.mktemp("large")
    write_text(folder)
    assert on_ranks(2, trained, large(folder)) == ["finished"] * 2
    assert "late/weight/backbone.embedding.weight" in open_checkpoint(folder / "run").tensors  # chosen by their number
    return folder


def trained(_: Group, config: RunConfig) -> str:
    return pretrain(config, Launch()).ending


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 2**12)


def started(group: Group, config: RunConfig, resumes: bool) -> int:
    """Bytes that starting takes at most beside what a rank keeps; all code and connections are there before."""
    begun(group, small_config(Path("nowhere"), {"engine.embedding": "rows"}), None)
    checkpoint = open_checkpoint(config.folder().path) if resumes else None
    return peak_above(lambda: begun(group, config, checkpoint))[1]


def begun(group: Group, config: RunConfig, checkpoint: Checkpoint | None) -> Engine:
    weights = starting_weights(config, group, checkpoint)
    engine, _ = build_engine(RunPlan.of(config, group.size), Mesh.build(group), CPU, weights)
    if checkpoint is not None:
        engine.load(checkpoint, checkpoint.step)
    return engine


@measures_peaks
@pytest.mark.parametrize("way", ["new", "resumed", "from another"])
def test_a_rank_starts_with_its_rows_and_a_block(run: Path, way: str) -> None:
    init = {"init": {"from_checkpoint": str(run / "run"), "mode": "continue"}} if way == "from another" else {}
    assert max(on_ranks(2, started, large(run, init), way == "resumed")) < TABLE / 3


def exported(source: Path, folder: Path, alone: bool) -> int:
    """Bytes that an export takes at most; `alone`: compared with itself instead of with transformers."""
    trained(Group(), small_config(source, {"output_dir": str(folder / "small"), "engine.embedding": "rows"}))
    export(folder / "small", folder / "warm", "pmi")
    if alone:
        model = TrainedModel.open(source / "run")
        verify._exported_outputs = lambda _, target, *rest: verify.expected_outputs(model, target.head, *rest)
    return peak_above(lambda: export(source / "run", folder / "out", "pmi"))[0]


@measures_peaks
@pytest.mark.parametrize(("alone", "tables"), [long(True, 0.8), (False, 1.7)])
def test_an_export_holds_a_block_and_what_transformers_loads_to_compare(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool, tables: float
) -> None:
    """Measured: 0.6 tables, of which vectors and logits as long as the vocabulary are most; 1.4 with transformers."""
    monkeypatch.setattr(verify, "_MAX_LOGITS", 1)  # logits of a token a row
    assert forked(exported, run, tmp_path, alone) < tables * TABLE
