"""The demo from end to end, on a little text and few steps: real corpus, launcher (once), export and harness."""

from __future__ import annotations

import email
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
from rich.console import Console

from demo_pipeline.pipeline import ROOT, Pipeline, show, train
from demo_pipeline.stages import MODELS, QUICK
from support.forked import fork_pythons, run_script
from support.long import long_but

LITTLE = [
    "model.vocab_size=1024",
    "model.hidden_size=48",
    "data.sequence_length=64",
    "training.steps=12",
    "training.evaluate_every=6",
    "training.checkpoint_every=6",
    "training.evaluate_samples=16",
    "schedule.warmup_steps=2",
]


def without_a_launcher(config: str, overrides: Sequence[str], console: Console) -> None:
    settings = [word for override in overrides for word in ("--set", override)]
    done = run_script("launch/pretrain.py", "--config", f"configs/{config}.yaml", *settings)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("model", long_but(["pythia"], MODELS))
def test_text_to_a_speaking_model_and_everything_reused_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(ROOT)
    fork_pythons(monkeypatch)
    trainings = {"demo-headless": train, "demo-head": without_a_launcher}
    monkeypatch.setattr("demo_pipeline.pipeline.train", lambda config, *rest: trainings[config](config, *rest))
    roots = [Path(str(module.__file__)).parent for module in (email, logging, numpy)]
    console = Console(record=True, width=80)
    pipeline = Pipeline(tmp_path, console, size=QUICK.of(model), overrides=LITTLE, roots=roots)
    rows = pipeline.run(with_vanilla=False)
    assert [row["model"] for row in rows] == ["tied head", "pmi head", "trained head"]
    assert all(1 < row["perplexity"] < 2000 for row in rows)
    assert json.loads((tmp_path / "results.json").read_text()) == rows
    show(tmp_path, rows, pipeline.stages)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert "perplexity of the pmi head" in console.export_text()

    again = Pipeline(tmp_path, console, size=QUICK.of(model), overrides=LITTLE, roots=roots)
    assert again.run(with_vanilla=False) == rows
    assert all(stage.reused for stage in again.stages.finished)
