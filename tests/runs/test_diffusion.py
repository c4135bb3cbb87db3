"""Masked diffusion end to end: it learns, says that its held-out loss is a bound, and goes out with its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForMaskedLM

from megahead.commands.plot import last_values
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import ensure_hf_folder
from megahead.report.page import render_page
from megahead.report.read import read_metrics, read_runs
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text

MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "vocab_multiple": 64}
BERT = {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32}


def config_of(folder: Path, **changes: Any) -> RunConfig:
    fixed = {
        "model": MODEL | BERT,
        "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62, "diffusion": True},
        "training": {"steps": 30, "log_seconds": 0, "evaluate_every": 5, "evaluate_samples": 200},
        "batch": {"global_size": 16, "micro_size": 16},
        "optimizer.learning_rate": 1e-2,
    }
    return small_config(folder, fixed | changes)


def run(group: Group, config: RunConfig) -> str:
    return pretrain(config, Launch()).ending


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="headless"),
        pytest.param({"objective": {"name": "vanilla", "tied": True}}, id="vanilla"),
        long({"engine.embedding": "rows"}, id="rows"),
        long({"masking.strategy": "frequency"}, id="frequency"),
    ],
)
def test_the_bound_falls_and_is_called_one_and_the_export_has_a_head(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    write_text(tmp_path)
    assert on_ranks(1, run, config_of(tmp_path, **changes)) == ["finished"]
    first, *_, last = read_metrics(tmp_path / "run").validation
    assert last["perplexity"] < min(first["perplexity"], 52)  # 49 is what the ids' frequencies alone give
    assert last["upper_bound"] is True
    said = capfd.readouterr().out
    assert "masked diffusion" in said
    assert f"perplexity at most {last['perplexity']:,.1f}" in said
    alone = evaluate_checkpoint(tmp_path / "run", last["head"])
    assert alone.upper_bound
    assert alone.loss == pytest.approx(last["loss"], abs=1e-4)
    exported = ensure_hf_folder(tmp_path / "run")
    AutoModelForMaskedLM.from_pretrained(exported)
    assert f"perplexity at most {last['perplexity']:,.4g}" in (exported / "README.md").read_text()
    assert "\u2264 " in render_page(read_runs([tmp_path / "run"]))
    assert last_values(read_metrics(tmp_path / "run"))["upper bounds"] is True
