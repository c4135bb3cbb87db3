"""The step benchmark runs, and its ratio is that of the steps it timed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import bench_step
import pytest
import torch

from benchmarks.rows import token_rows
from benchmarks.steps import Mode, Variant, describe_ratio, variant_config
from benchmarks.timing import Clock, measure_matmul_rate
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.errors import FieldError
from megahead.estimate import run_flops
from megahead.losses.softmax import Softmax
from support.commands import config_file
from support.small_run import small_config, write_text


def test_both_objectives_take_real_steps_on_the_same_tokens(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path)
    rows = token_rows(config, None, count=16)
    assert [row.shape for row in rows] == [(2, 25)] * 16
    variants = [Variant(config, name, torch.device("cpu"), rows) for name in ("headless", "vanilla")]
    before = variants[0].model.backbone.embedding.weight.clone()
    for index in range(4):
        for variant in variants:
            variant.step(index)
    headless, vanilla = variants
    for parts in zip(*headless.times.values(), strict=True):
        assert min(parts) > 0  # body, loss and optimizer
    assert len(headless.seconds()) == 3  # the first is a warm-up
    assert vanilla.candidates == [60] * 3
    assert max(headless.candidates) < 48
    assert not torch.equal(before, headless.model.backbone.embedding.weight)
    ratios = sorted(b / a for a, b in zip(headless.seconds(), vanilla.seconds(), strict=True))
    in_cpu_time = sorted(b / a for a, b in zip(headless.cpu_seconds, vanilla.cpu_seconds, strict=True))
    said = describe_ratio(headless, vanilla)
    assert f"headless is {ratios[1]:.2f} times as fast as vanilla" in said
    assert f"; in CPU time {in_cpu_time[1]:.2f}; by operations" in said


def test_a_step_is_of_the_configs_micro_batches_and_candidates(tmp_path: Path) -> None:
    """Its gradient is that of the global batch as one micro-batch, with candidates of as many samples."""
    write_text(tmp_path)
    gradients, candidates = [], []
    for micro_size in (2, 8):
        config = small_config(tmp_path, {"batch.micro_size": micro_size, "objective.group_samples": 8})
        rows = token_rows(config, None, count=8 // micro_size)
        variant = Variant(config, "headless", torch.device("cpu"), rows)
        variant.weights.step = lambda clipping: None
        variant.step(0)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in variant.model.parameters()]))
        candidates.append(variant._prepare_step(0)[1])
        assert variant.tokens() == 8 * 24
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert candidates[0] == candidates[1] > 24


def test_the_cpu_time_of_a_step_is_that_of_its_threads_and_leaves_waiting_out(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"batch.global_size": 2})
    variant = Variant(config, "headless", torch.device("cpu"), token_rows(config, None, count=2))
    variant.model.backbone.blocks[0].register_forward_hook(lambda *_: time.sleep(0.3))
    for index in range(2):
        variant.step(index)
    ((elapsed,), (in_cpu_time,)) = variant.seconds(), variant.cpu_seconds
    assert elapsed > 0.3 > in_cpu_time > 0


def test_a_whole_last_block_gives_the_same_step(tmp_path: Path) -> None:
    config = config_from_dict(
        {
            "name": "encoder",
            "model": {"size": "bert-tiny", "vocab_size": 200, "hidden_dropout": 0, "attention_dropout": 0},
            "masking": {"mask_token": 4, "cls_token": 1, "sep_token": 2},
            "data": {"train": "", "sequence_length": 32},
            "batch": {"global_size": 4, "micro_size": 4},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 1},
        }
    )
    rows = token_rows(config, None, count=2)
    modes: tuple[Mode, ...] = ("default", "whole last block")
    short, whole = (Variant(config, "headless", torch.device("cpu"), rows, mode) for mode in modes)
    for index in range(2):
        for variant in (short, whole):
            variant.step(index)
    assert [short.name(), whole.name()] == ["headless", "headless, whole last block"]
    for one, other in zip(short.model.parameters(), whole.model.parameters(), strict=True):
        assert (one - other).abs().mean() < 1e-6  # after two steps of 1e-3, some of them along a gradient of rounding


def test_steps_drop_tokens_as_a_run_does_and_are_estimated_so(tmp_path: Path) -> None:
    tree = {
        "name": "encoder",
        "model": {"size": "bert-small", "vocab_size": 200},
        "masking": {"mask_token": 4, "cls_token": 1, "sep_token": 2},
        "data": {"train": "", "sequence_length": 32},
        "batch": {"global_size": 2, "micro_size": 2},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 1},
    }
    tree["masking"] |= {"dropping": {"from_layer": 1}}
    config = config_from_dict(tree)
    variant = Variant(config, "headless", torch.device("cpu"), token_rows(config, None, count=1))
    lengths = []
    for block in variant.model.backbone.blocks:
        block.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].shape[1]))
    variant.step(0)
    assert lengths == [32, 32, 16, 32]
    ((micro,), _) = variant._prepare_step(0)
    assert micro.batch.token_subsets[0].max_per_row == 16
    tree["masking"] |= {"dropping": None}
    plain = config_from_dict(tree)
    flops = [run_flops(one, 1).total for one in (config, plain)]
    assert flops[0] < 0.85 * flops[1]


def test_presets_without_data_draw_by_zipfs_law(tmp_path: Path) -> None:
    config = small_config(tmp_path, {"data.train": ""})
    (rows,) = token_rows(config, None, count=1)
    assert rows.shape == (2, 25)
    assert 0 < rows.min() <= rows.max() < 60  # 0 would end a document


def asked(*arguments: str) -> RunConfig:
    return bench_step._config(bench_step._parser().parse_args(arguments))


def test_precision_is_the_configs_unless_it_is_asked_for(tmp_path: Path) -> None:
    config = ("--config", config_file(tmp_path, {"engine.precision": "bf16"}))
    assert asked(*config).engine.precision == "bf16"
    assert asked(*config, "--set", "engine.precision=fp32").engine.precision == "fp32"
    assert asked(*config, "--precision", "fp32").engine.precision == "fp32"
    preset = ("--preset", "pythia-14m")
    assert asked(*preset).engine.precision == "fp32"
    assert asked(*preset, "--set", "engine.precision=bf16").engine.precision == "bf16"
    assert asked(*preset, "--precision", "bf16", "--micro-batch", "3").batch.micro_size == 3


def test_what_a_step_cannot_obey_is_reported(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    with pytest.raises(FieldError, match=r"`--micro-batch` must go with --preset, .*; use --set batch\.micro_size=N"):
        asked("--config", path, "--micro-batch", "4")
    half = {"engine.precision": "fp16", "engine.deepspeed": {"zero_optimization": {"stage": 1}}}
    with pytest.raises(FieldError, match=r"`engine\.precision` must be fp32 or bf16"):
        variant_config(small_config(tmp_path, half), "headless", "default")
    phases = small_config(tmp_path, {"objective.schedule": {"vanilla_share": 0.5}})
    with pytest.raises(FieldError, match=r"`objective\.schedule` must be left out of steps, each of one phase"):
        variant_config(phases, "headless", "default")


def encoder(**masking: Any) -> RunConfig:
    return config_from_dict(
        {
            "name": "encoder",
            "model": {"size": "bert-small", "vocab_size": 200},
            "masking": {"mask_token": 4, "cls_token": 1, "sep_token": 2} | masking,
            "data": {"train": "", "sequence_length": 32},
            "batch": {"global_size": 2, "micro_size": 2},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 10},
        }
    )


def test_masks_cost_what_they_cost_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of targets that falls is timed at its mean; what the model misses is looked up where masks follow it."""
    falling = encoder(rate=0.4, final_rate=0.2)
    variant = Variant(falling, "headless", torch.device("cpu"), token_rows(falling, None, count=1))
    ((micro,), _) = variant._prepare_step(0)
    assert len(micro.batch.target_ids_N) == 2 * round(0.3 * 30)
    asked: list[torch.Tensor] = []
    misses = Softmax.top1_errors
    monkeypatch.setattr(Softmax, "top1_errors", lambda self: asked.append(misses(self)) or asked[-1])
    for config, times in ((encoder(), 0), (encoder(strategy="hardest"), 1)):
        Variant(config, "headless", torch.device("cpu"), token_rows(config, None, count=1)).step(0)
        assert len(asked) == times


def test_settings_of_a_config_are_kept_where_objectives_are_compared(tmp_path: Path) -> None:
    tied = small_config(tmp_path, {"objective": {"name": "vanilla", "tied": True}, "engine.compile": True})
    kept = variant_config(tied, "vanilla", "default")
    assert (kept.objective.tied, kept.engine.compile) == (True, True)
    assert variant_config(tied, "headless", "default").objective.tied is False
    plain = small_config(tmp_path, {"engine.compile": False})
    assert variant_config(small_config(tmp_path), "headless", "default").engine.compile == "auto"
    assert [variant_config(plain, "headless", mode).engine.compile for mode in ("default", "compiled")] == [False, True]


def test_a_step_is_taken_in_the_configs_precision(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"engine.precision": "bf16"})
    variant = Variant(config, "headless", torch.device("cpu"), token_rows(config, None, count=4))
    kinds = []
    variant.model.backbone.blocks[0].mlp.up.register_forward_hook(lambda _, __, output: kinds.append(output.dtype))
    variant.step(0)
    assert kinds == [torch.bfloat16] * 4


def test_muon_moves_the_blocks_of_a_variant_that_is_to_have_it(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    optimizers = [variant_config(config, "headless", mode).optimizer.name for mode in ("default", "muon")]
    assert optimizers == ["adamw", "muon"]
    asked_for = bench_step._parser().parse_args(["--preset", "pythia-14m", "--objectives", "headless", "--muon"])
    assert bench_step._variants(asked_for, config) == [("headless", "default"), ("headless", "muon")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_matrix_rate_is_positive(precision: str) -> None:
    assert measure_matmul_rate(torch.device("cpu"), precision, size=64) > 0


class Counting(Clock):
    """Notes when it is asked and waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asked: list[str] = []

    def now(self) -> float:
        self.asked.append("now")
        return float(super().now())

    def wait(self) -> None:
        self.asked.append("wait")


def test_a_device_is_waited_for_before_and_after_a_step_and_never_within(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path)
    one = Variant(config, "headless", torch.device("cpu"), token_rows(config, None, count=4))
    one.clock = clock = Counting()
    one.step(0)
    assert clock.asked == ["wait", *["now"] * (5 * 4 + 2), "wait"]


def test_half_weights_follow_those_of_the_optimizer(tmp_path: Path) -> None:
    write_text(tmp_path)
    configs = [small_config(tmp_path, {"engine.precision": precision}) for precision in ("fp32", "bf16")]
    rows = token_rows(configs[0], None, count=16)
    full, half = (Variant(config, "headless", torch.device("cpu"), rows) for config in configs)
    before = [parameter.detach().clone() for parameter in full.model.parameters()]
    for index in range(4):
        for one in (full, half):
            one.step(index)
    assert {(mine.dtype, mine.grad) for mine in half.model.parameters()} == {(torch.bfloat16, None)}
    first, mine, theirs = (
        torch.cat([parameter.detach().float().flatten() for parameter in parameters])
        for parameters in (before, half.model.parameters(), full.model.parameters())
    )
    assert (mine - theirs).norm() < 0.2 * (theirs - first).norm() + 4e-3 * theirs.norm()  # and the rounding to bf16
