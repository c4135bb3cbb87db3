"""What the first lines of a run say of phases, and of weights that move otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.config.loading import load_config
from megahead.config.plan import RunPlan
from megahead.train import run
from megahead.train.preflight import describe_assumed_device, describe_launches, describe_run
from megahead.train.run import describe_precision, pretrain
from megahead.train.step import peak_flops
from support.small_run import small_config, write_text


def described(folder: Path, **changes: Any) -> dict[str, str]:
    return dict(describe_run(RunPlan.of(small_config(folder, changes))))


def test_an_ordinary_run_says_nothing_of_them(tmp_path: Path) -> None:
    assert not {"phases", "optimizer"} & described(tmp_path).keys()


@pytest.mark.parametrize(("tied", "head"), [(False, 64 * 32 + 64), (True, 64)])
def test_a_run_in_phases_tells_their_steps_and_counts_its_head(tmp_path: Path, tied: bool, head: int) -> None:
    lines = described(tmp_path, **{"objective.schedule": {"vanilla_share": 0.5}, "objective.tied": tied})
    kind = "tied" if tied else "untied"
    assert lines["phases"] == f"headless for 3 steps, then vanilla ({kind}, with a bias) for 3 steps"
    assert lines["objective"].startswith("headless, ")
    assert lines["parameters"].endswith(f" {head:,} head)")


def test_own_rates_are_told(tmp_path: Path) -> None:
    muon = {"optimizer.name": "muon", "optimizer.muon": {"learning_rate_ratio": 0.5}}
    rated = {"optimizer.table": {"learning_rate_ratio": 8}}
    told = "muon for the matrices of blocks at 0.5 times the learning rate, adamw for the rest"
    assert described(tmp_path, **muon)["optimizer"] == told
    table = described(tmp_path, **rated, **{"objective.name": "vanilla"})["optimizer"]
    assert table == "8 times the learning rate for embedding and head"
    rows = described(tmp_path, **rated, **{"engine.embedding": "rows"})
    assert "optimizer" not in rows
    assert rows["embedding"].endswith("updated by adamw at 8 times the learning rate")


def test_the_temperature_of_another_score_is_told_also_where_it_is_the_default(tmp_path: Path) -> None:
    """At which a cosine can hardly prefer a token."""
    assert "temperature" not in described(tmp_path)["objective"]
    told = described(tmp_path, **{"objective.score": "cosine"})["objective"]
    assert told.endswith("scored by cosine, temperature 1")


@pytest.mark.parametrize(
    ("masking", "told"),
    [
        ({"strategy": "frequency"}, "15% of the tokens masked, by frequency"),
        ({"masks_from_layer": 2}, "15% of the tokens masked, mask tokens from layer 2 on"),
        ({"mask_decoder_layers": 1}, "15% of the tokens masked, mask tokens in a decoder of 1 layer"),
        ({"dropping": {"from_layer": 1}}, "15% of the tokens masked, 50% of the tokens in layers 1 to 2, by hardest"),
        ({"dropping": {"from_layer": 2, "keep_share": 0.3}}, "masked, 30% of the tokens in layer 2, by hardest"),
    ],
    ids=str,
)
def test_masks_and_what_layers_compute_of_them_are_told(tmp_path: Path, masking: dict[str, Any], told: str) -> None:
    ids = {"mask_token": 3, "cls_token": 1, "sep_token": 2}
    model = {"family": "bert", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 60}
    assert described(tmp_path, model=model, masking=ids | masking)["objective"].endswith(told)


def test_a_share_of_warmup_follows_the_length(tmp_path: Path) -> None:
    for steps, told in ((6, "3 steps of warm-up"), (2, "1 step of warm-up")):
        lines = described(tmp_path, **{"schedule.warmup_steps": 0.5, "training.steps": steps})
        assert told in lines["schedule"]


@pytest.mark.parametrize(
    ("precision", "by_auto", "fast", "warns"),
    [
        ("bf16", False, False, True),
        ("bf16", False, True, False),
        ("bf16", True, False, False),
        ("fp32", False, False, False),
    ],
)
def test_bf16_on_a_processor_without_it_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, by_auto: bool, fast: bool, warns: bool
) -> None:
    monkeypatch.setattr(run, "has_fast_bf16", lambda _: fast)
    plan = RunPlan.of(small_config(tmp_path, {"engine.precision": precision}), precision_was_auto=by_auto)
    lines = dict(describe_precision(plan, torch.device("cpu")))
    assert lines.get("warning", "").endswith("set engine.precision to fp32 or auto") == warns
    assert not describe_precision(plan, torch.device("cuda"))


@pytest.mark.parametrize(
    ("device", "on"), [("cpu", "2 x cpu"), ("auto", "2 x cuda, assumed (engine.device: cpu plans for processors)")]
)
def test_a_dry_run_names_the_device_that_it_assumes(tmp_path: Path, device: str, on: str) -> None:
    assert describe_assumed_device(RunPlan.of(small_config(tmp_path, {"engine.device": device}), 2)) == ("on", on)


def test_a_run_in_slow_bf16_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "has_fast_bf16", lambda _: False)
    write_text(tmp_path)
    pretrain(small_config(tmp_path, {"engine.precision": "bf16", "schedule.warmup_steps": 0, "training.steps": 1}))
    assert "warning     this processor does not multiply bf16" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["batch.micro_size=8"], "about 5.4 ms, and the host about 17 to launch: "),
        (["batch.micro_size=16", "parallel.tensor=2"], "about 5.4 ms, and the host about 25 to launch: "),
        ([], ""),
    ],
)
def test_micro_batches_too_small_for_the_device_are_told_with_the_way_out(settings: list[str], told: str) -> None:
    plan = RunPlan.of(load_config("pythia-70m-headless", settings), 2)
    assert describe_launches(plan, None) == []
    said = "".join(line for _, line in describe_launches(plan, peak_flops("NVIDIA H100", "bf16")))
    assert told in said
    assert bool(said) == bool(told)
    assert not said or said.endswith("with objective.group_samples=8 keeps the candidates and fills the device")
