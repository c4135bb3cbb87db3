"""What is not finite is never saved, whatever let it through: the run ends, the checkpoint before stays the newest."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megahead.checkpoints.reading import newest_valid
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.distributed.tensors import FullTensors
from megahead.engine.engine import Engine, StepResult
from megahead.errors import CheckpointError
from megahead.evaluate.perplexity import ValidationResult
from megahead.train.loop import Evaluation
from megahead.train.run import pretrain
from support.long import long
from support.named import without_digits
from support.on_ranks import on_ranks
from support.small_run import small_config, stage, write_text

SENTENCE = (
    "a checkpoint must hold finite numbers only, but at step 4 {} has others; it was not saved (older checkpoints are "
    "unharmed): clip gradients or lower optimizer.learning_rate, and resume."
)


def ended(config: RunConfig) -> str:
    try:
        return pretrain(config, Launch()).ending
    except CheckpointError as error:
        return str(error)


def run_and_spoil(group: Group, config: RunConfig, name: str, value: float) -> str:
    """A run whose last number of tensor `name` becomes `value` in the fourth step."""
    take = Engine.step

    def step(engine: Engine, learning_rate: float) -> StepResult:
        result = take(engine, learning_rate)
        if engine.optimizer_steps == 4:
            tensors = {name: tensor.clone() for name, tensor in engine.tensors()}
            tensors[name].view(-1)[-1] = value
            engine.load(FullTensors(tensors.__getitem__), 4)
        return result

    Engine.step = step  # type: ignore[method-assign]
    return ended(config)


EVERY_OTHER = {"training.checkpoint_every": 2, "training.evaluate_every": 4}


def assert_the_one_before_is_the_newest(run: Path) -> None:
    newest, damage = newest_valid(run)
    assert newest is not None
    assert (newest.step, damage) == (2, [])
    assert [without_digits(folder.name) for folder in (run / "checkpoints").glob("*step*")] == ["step-00000002"]
    assert all(newest.read(name).isfinite().all() for name in newest.names())


@pytest.mark.parametrize(
    ("zero", "name", "value", "background"),
    [
        (0, "weight/backbone.blocks.1.mlp.up.bias", math.nan, False),
        (1, "exp_avg/backbone.embedding.weight", -math.inf, True),
        (3, "exp_avg_sq/backbone.final_norm.weight", math.inf, False),
        long(3, "exp_avg_sq/backbone.final_norm.weight", math.inf, True),
    ],
)
def test_tensors_that_are_not_finite_end_the_run_on_all_ranks(
    tmp_path: Path, zero: int, name: str, value: float, background: bool
) -> None:
    write_text(tmp_path)
    changes = EVERY_OTHER | stage(zero) | {"training.save_in_background": background}
    assert on_ranks(2, run_and_spoil, small_config(tmp_path, changes), name, value) == [SENTENCE.format(name)] * 2
    assert_the_one_before_is_the_newest(tmp_path / "run")


def run_and_misjudge(group: Group, config: RunConfig) -> str:
    Evaluation.run = lambda *_: ValidationResult(math.nan, math.nan, 0.0, None)  # type: ignore[method-assign]
    return ended(config)


def test_counters_that_are_not_finite_end_the_run_as_well(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, EVERY_OTHER)
    assert on_ranks(2, run_and_misjudge, config) == [SENTENCE.format("state/validation")] * 2
    assert_the_one_before_is_the_newest(tmp_path / "run")


def run_with_huge_weights(group: Group, config: RunConfig) -> str:
    """Finite ones whose sum is not."""
    tensors = Engine.tensors
    huge = torch.full((2,), torch.finfo(torch.float32).max)
    Engine.tensors = lambda engine: iter([*tensors(engine), ("weight/huge", huge)])  # type: ignore[method-assign]
    return ended(config)


def test_finite_numbers_of_any_size_are_saved(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(1, run_with_huge_weights, small_config(tmp_path)) == ["finished"]
