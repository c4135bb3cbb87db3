"""Whole runs: they learn, ranks do not matter, and nothing is lost on the way."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import CheckpointError, ConfigError, UserError
from megahead.report.read import read_metrics
from megahead.train.log import RunLogger
from megahead.train.run import pretrain
from megahead.train.start import starting_weights
from support.long import long, long_but
from support.named import folder_of
from support.on_ranks import on_ranks
from support.small_checkpoint import save_tokenizer
from support.small_run import shipped, small_config, stage, write_text


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder).training]


def tensors(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def assert_same_tensors(mine: Path, theirs: Path) -> None:
    ours, others = tensors(mine), tensors(theirs)
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, others[name]), name


def test_a_headless_run_learns_and_its_training_free_head_beats_the_unigram(tmp_path: Path) -> None:
    write_text(tmp_path)
    changes = {"training.steps": 150, "training.evaluate_every": 150, "optimizer.learning_rate": 1e-2}
    changes |= {"batch.micro_size": 8}
    on_ranks(1, run, small_config(tmp_path, changes))
    curve = losses(tmp_path / "run")
    assert sum(curve[-10:]) / 10 < curve[0] - 1
    (evaluation,) = read_metrics(tmp_path / "run").validation
    assert evaluation["perplexity"] < 15  # 60 equally likely ids, about 50 by frequency, 3 to 4 in truth


def run_and_ask(group: Group, config: RunConfig) -> set[bool]:
    """Whether deterministic algorithms were demanded in its steps."""
    demanded: set[bool] = set()
    step = RunLogger.log_step

    def asking(*args: Any, **kwargs: Any) -> None:
        demanded.add(torch.are_deterministic_algorithms_enabled())
        step(*args, **kwargs)

    RunLogger.log_step = asking  # type: ignore[method-assign]
    run(group, config)
    return demanded


def test_deterministic_algorithms_are_demanded_and_enough(tmp_path: Path) -> None:
    write_text(tmp_path)
    demanding = {"engine.deterministic": True, "output_dir": str(tmp_path / "demanding")}
    assert on_ranks(1, run_and_ask, small_config(tmp_path, demanding)) == [{True}]
    assert on_ranks(1, run_and_ask, small_config(tmp_path)) == [{False}]
    assert losses(tmp_path / "demanding") == losses(tmp_path / "run")


def run_telling(group: Group, config: RunConfig) -> str:
    """A run whose own lines begin with `run: `."""
    RunLogger.print_line = lambda logger, text: print(
        *(f"run: {line}" for line in text.splitlines()), sep="\n", flush=True
    )  # type: ignore[method-assign]
    return run(group, config)


@pytest.mark.parametrize(
    "settings", ["zero0", "zero1", long("zero1_offload"), long("zero2"), long("zero3"), "zero3_offload"]
)
def test_training_and_evaluating_print_the_runs_own_lines_only(
    tmp_path: Path, settings: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)
    muon = {"optimizer.name": "muon"} if settings == "zero1" else {}
    on_ranks(1, run_telling, small_config(tmp_path, {"engine.deepspeed": shipped(settings)} | muon))
    told = capfd.readouterr()
    assert "run: held out at step 6" in told.out
    assert [line for line in told.out.splitlines() if not line.startswith("run: ")] == []
    assert told.err == ""


@pytest.mark.parametrize(
    ("zero", "objective"),
    [
        (0, {"name": "headless"}),
        long(1, {"name": "vanilla"}),
        long(2, {"candidates": "own"}),
        long(1, {"name": "headless"}),
        long(0, {"name": "vanilla"}),
        long(0, {"name": "vanilla", "tied": True}),
        long(1, {"name": "vanilla", "tied": True}),
    ],
    ids=str,
)
def test_two_ranks_give_the_curve_of_one(tmp_path: Path, objective: dict[str, Any], zero: int) -> None:
    write_text(tmp_path)
    changes = stage(zero) | {"objective": objective}
    on_ranks(1, run, small_config(tmp_path, changes | {"output_dir": str(tmp_path / "one")}))
    on_ranks(2, run, small_config(tmp_path, changes | {"output_dir": str(tmp_path / "two")}))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    one, two = read_metrics(tmp_path / "one").validation, read_metrics(tmp_path / "two").validation
    assert two[-1]["loss"] == pytest.approx(one[-1]["loss"], abs=1e-5)
    counts = "state/target_counts"
    assert torch.equal(tensors(tmp_path / "one")[counts], tensors(tmp_path / "two")[counts])


@pytest.mark.parametrize(
    ("zero", "ranks"), long_but([(0, 1), (1, 2), (3, 2)], [(zero, n) for zero in (0, 1, 2, 3) for n in (1, 2)])
)
def test_resume_is_bitwise(tmp_path: Path, zero: int, ranks: int) -> None:
    write_text(tmp_path)
    changes = stage(zero) | {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
    on_ranks(ranks, run, small_config(tmp_path, changes))
    resumed = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "resumed")})
    on_ranks(ranks, run, resumed, str(tmp_path / "run/checkpoints/step-00000003"))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "run")[3:]
    assert_same_tensors(tmp_path / "resumed", tmp_path / "run")


def test_a_blend_of_packed_documents_resumes_bitwise_and_continues_on_other_ranks(tmp_path: Path) -> None:
    blend = [
        {"prefix": write_text(tmp_path), "weight": 3},
        {"prefix": write_text(tmp_path, name="other", documents=20, seed=1), "weight": 1},
    ]
    changes = {"data.train": blend, "data.pack": "best_fit", "data.documents_a_row": 4}
    on_ranks(2, run, small_config(tmp_path, changes))
    resumed = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "resumed")})
    on_ranks(2, run, resumed, str(tmp_path / "run/checkpoints/step-00000003"))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "run")[3:]
    assert_same_tensors(tmp_path / "resumed", tmp_path / "run")
    alone = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "alone")})
    on_ranks(1, run, alone, str(tmp_path / "run/checkpoints/step-00000003"))
    assert losses(tmp_path / "alone") == pytest.approx(losses(tmp_path / "run")[3:], abs=1e-5)
    other = small_config(tmp_path, changes | {"data.pack": "stream", "data.documents_a_row": None})
    (sentence,) = on_ranks(1, refused, other, "auto", CheckpointError)
    assert "data.pack (was best_fit, is stream)" in sentence


def test_resume_on_other_ranks_and_another_stage_continues_the_curve(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(2, run, small_config(tmp_path, stage(1)))
    resumed = small_config(tmp_path, stage(3) | {"output_dir": str(tmp_path / "resumed")})
    on_ranks(1, run, resumed, str(tmp_path / "run/checkpoints/step-00000003"))
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "run")[3:], abs=1e-5)


def interrupted(group: Group, config: RunConfig, at_step: int) -> str:
    """One rank, not the first, gets SIGTERM in the middle of training."""
    step = RunLogger.log_step

    def step_then_signal(logger: RunLogger, report: Any, state: Any, **kwargs: Any) -> None:
        step(logger, report, state, **kwargs)
        if state.step == at_step and group.rank == group.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    RunLogger.log_step = step_then_signal  # type: ignore[method-assign]
    return pretrain(config, Launch(), "auto").ending


def test_sigterm_on_one_rank_saves_and_auto_resume_is_bitwise(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(2, run, small_config(tmp_path, {"output_dir": str(tmp_path / "undisturbed")}))
    config = small_config(tmp_path)
    assert on_ranks(2, interrupted, config, 2) == ["stopped", "stopped"]
    assert open_checkpoint(tmp_path / "run").step == 2
    assert on_ranks(2, run, config) == ["finished", "finished"]
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    assert_same_tensors(tmp_path / "run", tmp_path / "undisturbed")


def refused(group: Group, config: RunConfig, resume: str, error: type[UserError]) -> str:
    with pytest.raises(error) as caught:
        pretrain(config, Launch(), resume)
    return str(caught.value)


def test_another_run_cannot_be_resumed(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path))
    other = small_config(tmp_path, {"seed": 1, "model.activation": "gelu", "objective.bias": "once"})
    (sentence,) = on_ranks(1, refused, other, "auto", CheckpointError)
    for difference in (
        "seed (was 1234, is 1)",
        "model.activation (was gelu_tanh, is gelu)",
        "objective.bias (was paper, is once)",
    ):
        assert difference in sentence
    (sentence,) = on_ranks(1, refused, small_config(tmp_path), "never", CheckpointError)
    assert "`--resume never`" in sentence


def test_time_limit_ends_a_run_saved_and_evaluated(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"training.steps": 100_000, "training.max_seconds": 0.3})
    assert on_ranks(2, run, config) == ["out of time"] * 2
    step = open_checkpoint(tmp_path / "run").step
    assert 0 < step < 100_000
    logged = read_metrics(tmp_path / "run")
    assert logged.validation[-1]["step"] == logged.training[-1]["step"] == step


def test_a_run_goes_on_with_its_own_copy_of_the_tokenizer(tmp_path: Path) -> None:
    write_text(tmp_path)
    save_tokenizer(tmp_path / "tokenizer.json")
    given = {"data.tokenizer": str(tmp_path / "tokenizer.json"), "model.vocab_size": 300}
    assert on_ranks(1, run, small_config(tmp_path, given)) == ["finished"]
    own = tmp_path / "run" / "tokenizer.json"
    content = own.read_bytes()
    config = small_config(tmp_path, given | {"data.tokenizer": str(own), "training.steps": 8})
    assert on_ranks(1, run, config) == ["finished"]
    assert own.read_bytes() == content


@pytest.mark.parametrize("zero", [1, long(2), long(3)])
def test_a_probe_in_bf16_saves_the_body_it_was_given_and_after_resuming_too(tmp_path: Path, zero: int) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path))
    changes = {
        "init": {"from_checkpoint": str(tmp_path / "run"), "mode": "probe"},
        "objective.name": "vanilla",
        "output_dir": str(tmp_path / "head"),
        "engine.precision": "bf16",
    }
    given = {name: value for name, value in tensors(tmp_path / "run").items() if name.startswith("weight/")}
    for steps in (3, 6):
        config = small_config(tmp_path, changes | stage(zero) | {"training.steps": steps})
        assert on_ranks(2, run, config) == ["finished"] * 2
        saved = tensors(tmp_path / "head")
        assert [name for name, value in given.items() if not torch.equal(value, saved[name])] == []


@pytest.mark.parametrize("mode", ["finetune", long("probe")])
def test_a_head_is_trained_from_a_copy_of_the_embedding(tmp_path: Path, mode: str) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path))
    changes = {
        "init": {"from_checkpoint": str(tmp_path / "run"), "mode": mode},
        "objective.name": "vanilla",
        "output_dir": str(tmp_path / "head"),
        "training.steps": 12,
    }
    on_ranks(2, run, small_config(tmp_path, changes | stage(1)))
    curve = losses(tmp_path / "head")
    assert curve[-1] < curve[0]
    before, after = tensors(tmp_path / "run"), tensors(tmp_path / "head")
    body_moved = not torch.equal(
        before["weight/backbone.blocks.0.mlp.up.weight"], after["weight/backbone.blocks.0.mlp.up.weight"]
    )
    assert body_moved is (mode == "finetune")
    assert not torch.equal(after["weight/head.weight"], before["weight/backbone.embedding.weight"])
    first = tensors(tmp_path / "head/checkpoints/step-00000003")["weight/head.weight"]
    assert (first - before["weight/backbone.embedding.weight"]).abs().max() < 0.05  # three steps away from its start


@pytest.mark.parametrize(("objective", "mode"), [("own", "finetune"), ("vanilla", "probe")])
def test_a_head_that_is_there_is_trained_from_where_it_is(tmp_path: Path, objective: str, mode: str) -> None:
    write_text(tmp_path)
    trained = {"objective.name": "vanilla"} if objective == "vanilla" else {"objective.candidates": objective}
    on_ranks(1, run, small_config(tmp_path, trained | {"training.steps": 2}))
    init = {"from_checkpoint": str(tmp_path / "run"), "mode": mode}
    changes = {"init": init, "objective.name": "vanilla", "output_dir": str(tmp_path / "head")}
    weights = starting_weights(small_config(tmp_path, changes), Group())
    assert torch.equal(weights.read("head.weight"), tensors(tmp_path / "run")["weight/head.weight"])


@pytest.mark.parametrize("zero", [0, long(3)])
def test_a_run_that_began_from_another_goes_on_without_it(tmp_path: Path, zero: int) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path))
    init = {"from_checkpoint": str(tmp_path / "run"), "mode": "finetune"}
    changes = stage(zero) | {"init": init, "objective.name": "vanilla", "output_dir": str(tmp_path / "head")}
    on_ranks(2, run, small_config(tmp_path, changes))
    undisturbed = tensors(tmp_path / "head")
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(folder_of(tmp_path / "head", 6))
    assert on_ranks(2, run, small_config(tmp_path, changes)) == ["finished"] * 2
    resumed = tensors(tmp_path / "head")
    assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in resumed.items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model.hidden_size": 64}, "must hold weight/backbone.embedding.weight of shape (64, 64), but has (64, 32)"),
        ({"model.num_layers": 3}, "must hold weight/backbone.blocks.2.attention_norm.weight, but does not"),
        (
            {"objective": {"candidates": "own"}, "init.mode": "continue"},
            "must hold weight/head.weight, but does not; is it of another model or objective? A decoder's `init.mode: "
            "finetune` copies the embedding to it.",
        ),
        ({"init.from_checkpoint": "nowhere"}, "`init.from_checkpoint` must hold a checkpoint, but nowhere holds none."),
        ({"model.num_heads": 2}, "but is another instead; set num_heads=4, num_key_heads=4, head_dim=8."),
        ({"model.parallel_residual": False}, "but is another instead; set parallel_residual=True."),
    ],
)
def test_a_checkpoint_of_another_model_is_no_start(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    write_text(tmp_path)
    on_ranks(1, run, small_config(tmp_path))
    changes = {"init.from_checkpoint": str(tmp_path / "run"), "objective.name": "vanilla"}
    config = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "head")} | change)
    (found,) = on_ranks(1, refused, config, "auto", UserError)
    assert sentence in found
    assert not (tmp_path / "head").exists()


def test_steps_that_are_not_finite_are_skipped_said_and_end_the_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"optimizer.learning_rate": 1e30, "training.steps": 50})
    (sentence,) = on_ranks(1, refused, config, "auto", UserError)
    assert "steps must be finite" in sentence
    assert "20 bad in a row" in sentence


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    (sentence,) = on_ranks(1, refused, small_config(tmp_path, {"model.vocab_size": 50}), "auto", ConfigError)
    assert sentence == "`model.vocab_size` must be at least that of data.train (60), but is 50 instead."
    assert not (tmp_path / "run").exists()
