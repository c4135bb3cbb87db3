"""Runs that begin headless and end with the vanilla softmax: nothing jumps, and both parts are ordinary runs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import export
from megahead.hf.heads import best_head
from megahead.hf.trained import TrainedModel
from megahead.report.read import read_metrics
from megahead.train.log import RunLogger
from megahead.train.run import pretrain
from support.bad_rows import run_with
from support.long import long
from support.named import folder_of, without_digits
from support.on_ranks import on_ranks
from support.plain_phases import plain_phases
from support.small_run import one_step_more, same_tensors, shipped, small_config, stage, write_text

STEPS, SWITCH = 8, 5
AROUND = [SWITCH - 2, SWITCH, SWITCH + 1]
SCHEDULE: dict[str, Any] = {
    "objective.schedule": {"vanilla_share": 3 / 8},
    "optimizer.eps": 1e-4,
    "optimizer.gradient_clipping": 0.5,
    "batch.global_size": 4,
    "training.steps": STEPS,
    "training.checkpoint_every": 1,
    "training.evaluate_every": 100,
}
TIED = {"objective.tied": True}
ROWS = {"engine.embedding": "rows"}
LLAMA = {"model.family": "llama", "model.num_key_heads": 1}
ENCODER = {
    "model.family": "bert",
    "model.vocab_size": 64,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62},
}


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    try:
        return pretrain(config, Launch(), resume).ending
    except UserError as error:
        return str(error)


def scheduled(folder: Path, **changes: Any) -> RunConfig:
    return small_config(folder, SCHEDULE | changes)


def trained(folder: Path, ranks: int, changes: dict[str, Any], resume: str = "auto") -> Path:
    """A run's folder once it has ended."""
    config = scheduled(folder, **changes)
    assert on_ranks(ranks, run, config, resume) == ["finished"] * ranks
    return Path(config.folder())


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("ranks", "changes", "apart"),
    [
        (1, {}, 1e-6),
        (1, TIED | {"objective.learned_temperature": True, "objective.temperature": 2.0}, 1e-6),
        (1, LLAMA | {"objective.bias": "once", "objective.negatives": 9}, 1e-6),
        (1, ENCODER, 1e-6),
        (2, stage(3) | TIED | {"objective.bias": "corrected"}, 1e-6),
        (1, {"objective.candidates": "own"}, 1e-6),
        (2, stage(1) | ROWS, 1e-6),
        long(4, stage(1) | ROWS | {"parallel.tensor": 2}, 1e-6),
        long(2, stage(1) | {"engine.precision": "bf16"}, 1e-3),
        long(1, TIED | {"objective.score": "cosine", "objective.temperature": 0.1}, 1e-6),
        long(2, stage(1) | {"objective.score": "harmonic", "objective.temperature": 0.2, "parallel.tensor": 2}, 1e-5),
    ],
    ids=[
        "untied",
        "tied",
        "llama",
        "encoder",
        "corrected",
        "own",
        "in rows",
        "in rows on a mesh",
        "bf16",
        "cosine",
        "harmonic",
    ],
)
def test_the_softmax_begins_with_what_the_training_free_head_ended_with(
    tmp_path: Path, ranks: int, changes: dict[str, Any], apart: float
) -> None:
    """By held-out loss, from the same weights, before and after."""
    write_text(tmp_path)
    folder = trained(tmp_path, ranks, changes)
    at_switch = [r["validation"] for r in records(folder) if "validation" in r and r["step"] == SWITCH]
    heads = [found["head"] for found in at_switch]
    assert heads == ["tied" if changes.get("objective.bias") == "corrected" else "pmi", *heads[1:]]
    assert heads[1:] == ["tied" if "objective.tied" in changes else "trained"]
    before, after = (found["loss"] for found in at_switch)
    assert after == pytest.approx(before, abs=apart)
    last = read_metrics(folder).validation[-1]
    assert last["step"] == STEPS
    if changes is not ENCODER:  # masked tokens of random walks are not learned in so few steps
        assert last["loss"] < after


def on_mesh(number: int, tensor: int) -> dict[str, Any]:
    """The settings we ship for a stage, at the size of a small model."""
    small = {"reduce_bucket_size": 2000, "stage3_param_persistence_threshold": 0}
    zero = shipped(f"zero{number}")["zero_optimization"] | small
    return {"parallel.tensor": tensor, "engine.deepspeed": {"zero_optimization": zero}}


@pytest.mark.parametrize(
    ("number", "tensor", "data", "changes"),
    [long(number, 2, 2, TIED if number % 2 else {}) for number in (0, 1, 2, 3)]
    + [(0, 1, 1, TIED), long(3, 1, 2, {}), (1, 1, 2, ROWS), long(2, 2, 1, LLAMA | TIED)],
    ids=str,
)
def test_both_phases_equal_plain_torch(
    tmp_path: Path, number: int, tensor: int, data: int, changes: dict[str, Any]
) -> None:
    """Weights and moments go on, those of the new head begin with 0."""
    write_text(tmp_path)
    reference = plain_phases(scheduled(tmp_path, **changes))
    folder = trained(tmp_path, tensor * data, on_mesh(number, tensor) | changes)
    curve, newest = read_metrics(folder).training, open_checkpoint(folder)
    assert [record["loss"] for record in curve] == pytest.approx(reference.losses, abs=3e-6)
    assert [record["gradient_norm"] for record in curve] == pytest.approx(reference.norms, rel=1e-5)
    assert [record["candidates"] == 0 for record in curve] == [step > SWITCH for step in range(1, STEPS + 1)]
    for name, weight in reference.weights.items():
        torch.testing.assert_close(newest.read(name), weight, rtol=0, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("ranks", "changes", "steps"),
    [
        (1, stage(0) | {"training.save_in_background": True, "objective.candidates": "own"}, AROUND),
        (2, stage(1) | ROWS, [SWITCH]),
        long(2, stage(2) | TIED | {"engine.precision": "bf16"}, AROUND),
        long(2, stage(3) | ROWS, AROUND),
        long(4, stage(1) | {"parallel.tensor": 2}, AROUND),
    ],
    ids=["0", "1 in rows", "2 in bf16, everywhere", "3 in rows, everywhere", "1 on a mesh"],
)
def test_a_resumed_run_equals_the_undisturbed_one_bitwise(
    tmp_path: Path, ranks: int, changes: dict[str, Any], steps: list[int]
) -> None:
    """From before the switch, at it, and after it."""
    write_text(tmp_path)
    whole = trained(tmp_path, ranks, changes)
    for step in steps:
        again = trained(
            tmp_path, ranks, changes | {"output_dir": str(tmp_path / f"{step}")}, str(folder_of(whole, step))
        )
        assert same_tensors(whole, again), step


def test_a_run_stopped_after_each_step_equals_the_undisturbed_one_bitwise(tmp_path: Path) -> None:
    write_text(tmp_path)
    whole = trained(tmp_path, 1, {})
    for ending in ["out of time"] * (STEPS - 1) + ["finished"]:
        assert on_ranks(1, run, scheduled(tmp_path, **one_step_more(tmp_path / "often"))) == [ending]
    assert open_checkpoint(tmp_path / "often").step == STEPS
    assert same_tensors(whole, tmp_path / "often")


@pytest.mark.parametrize(
    ("ranks", "steps"), [(2, [SWITCH - 1]), long(4, [SWITCH - 1, SWITCH, SWITCH + 1])], ids=["two", "four"]
)
def test_the_last_phase_goes_on_on_another_mesh(tmp_path: Path, ranks: int, steps: list[int]) -> None:
    write_text(tmp_path)
    whole = trained(tmp_path, 1, {})
    elsewhere = on_mesh(3, 2) | {"output_dir": str(tmp_path / "elsewhere")}
    for step in steps:
        again = trained(
            tmp_path, ranks, elsewhere | {"output_dir": str(tmp_path / str(step))}, str(folder_of(whole, step))
        )
        ours, theirs = open_checkpoint(again), open_checkpoint(whole)
        for name in theirs.names():
            torch.testing.assert_close(ours.read(name), theirs.read(name), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "changes", [{}, TIED | {"objective.temperature": 2.0}, long(LLAMA), ENCODER, long(ENCODER | TIED)], ids=str
)
def test_exports_and_evaluations_are_those_of_the_phase_that_saved(tmp_path: Path, changes: dict[str, Any]) -> None:
    """An export is compared with the checkpoint before it appears."""
    write_text(tmp_path)
    folder = trained(tmp_path, 1, changes)
    for step, head, name in ((SWITCH, "pmi", "headless"), (STEPS, "trained", "vanilla")):
        model = TrainedModel.open(folder_of(folder, step))
        assert (best_head(model), model.config.objective.name, model.config.objective.schedule) == (head, name, None)
        report = export(folder_of(folder, step), tmp_path / head, head)
        assert report.parity.compared == "logits"
    scored = evaluate_checkpoint(folder, "trained")
    assert scored.loss == pytest.approx(read_metrics(folder).validation[-1]["loss"], abs=1e-6)
    bias_V = TrainedModel.open(folder).learned_bias()
    born_V = TrainedModel.open(folder_of(folder, SWITCH)).training_free_bias()
    assert bias_V is not None
    assert 1e-4 < (bias_V - born_V).abs().max() < 0.1


def test_a_head_without_a_place_for_its_bias_is_told(tmp_path: Path) -> None:
    write_text(tmp_path)
    folder = trained(tmp_path, 1, LLAMA | {"model.qk_norm": True})
    with pytest.raises(
        UserError, match="`--head trained` needs a bias in the head, but no class of transformers has one"
    ):
        export(folder, tmp_path / "out", "trained")


BAD = (4 * SWITCH,)
"""The first sample of the step after the switch."""


def run_that_loses_the_switch(group: Group, config: RunConfig) -> str:
    """Its checkpoint is gone by the time that the bad step is noticed."""
    told = RunLogger.log_fault

    def losing(self: RunLogger, *facts: Any) -> str:
        shutil.rmtree(folder_of(config.folder().path, SWITCH))
        return told(self, *facts)

    RunLogger.log_fault = losing  # type: ignore[method-assign]
    return run_with(group, config, math.nan, BAD)


def test_a_rollback_goes_to_the_switch_and_not_before_it(tmp_path: Path) -> None:
    """Where nothing is left to go back to, a bad step is skipped."""
    write_text(tmp_path)
    skipped, back, lost = (
        scheduled(tmp_path, **{"faults.bad_step": policy, "output_dir": str(tmp_path / name)})
        for name, policy in (("skipped", "skip"), ("back", "rollback"), ("lost", "rollback"))
    )
    assert on_ranks(1, run_with, skipped, math.nan, BAD) == ["finished"]
    assert on_ranks(1, run_with, back, math.nan, BAD) == ["finished"]
    (rollback,) = (record["rollback"] for record in records(tmp_path / "back") if "rollback" in record)
    assert without_digits(rollback["checkpoint"]) == f"step-{SWITCH:08d}"
    assert same_tensors(tmp_path / "back", tmp_path / "skipped")
    assert on_ranks(1, run_that_loses_the_switch, lost) == ["finished"]
    assert same_tensors(tmp_path / "lost", tmp_path / "skipped")


def test_other_losses_are_no_spikes(tmp_path: Path) -> None:
    """The softmax over all ids has a higher loss than one over a few candidates."""
    write_text(tmp_path)
    few = {"batch.micro_size": 1, "data.sequence_length": 6}
    folder = trained(tmp_path, 1, few | {"faults.spike": "skip", "faults.spike_window": 16, "faults.spike_score": 6})
    assert not [record for record in records(folder) if "fault" in record]


def test_a_headless_run_in_progress_may_be_given_a_schedule(tmp_path: Path) -> None:
    write_text(tmp_path)
    whole = trained(tmp_path, 1, {})
    elsewhere = {"output_dir": str(tmp_path / "later")}
    begun = scheduled(tmp_path, **elsewhere, **{"objective.schedule": None, "training.max_seconds": 1e-9})
    assert on_ranks(1, run, begun) == ["out of time"]
    assert same_tensors(whole, trained(tmp_path, 1, elsewhere))


def test_the_switch_cannot_be_moved_behind_what_has_gone_over(tmp_path: Path) -> None:
    write_text(tmp_path)
    trained(tmp_path, 1, {})
    (sentence,) = on_ranks(1, run, scheduled(tmp_path, **{"training.steps": 16}))
    assert sentence.startswith("`objective.schedule` must have the phase that saved ")
    assert without_digits(sentence).endswith(
        "step-00000008 from step 5 to at least step 8, but has it from step 10 to step 16 instead; set training.steps "
        "or the share back."
    )


def test_the_switch_cannot_be_moved_before_what_has_not_gone_over(tmp_path: Path) -> None:
    write_text(tmp_path)
    trained(tmp_path, 1, {"objective.schedule": None})
    (sentence,) = on_ranks(
        1, run, scheduled(tmp_path, **{"training.steps": 16, "objective.schedule": {"vanilla_share": 0.75}})
    )
    assert without_digits(sentence).endswith(
        "step-00000008 from step 0 to at least step 8, but has it from step 0 to step 4 instead; set training.steps or "
        "the share back."
    )


def test_the_banner_and_the_log_tell_the_switch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path)
    folder = trained(tmp_path, 1, TIED)
    told = capfd.readouterr().out
    assert told.count("phases      headless for 5 steps, then vanilla (tied, with a bias) for 3 steps") == 2
    assert "objective   vanilla, tied, all 60 ids, with a bias" in told
    sessions = [record["session"] for record in records(folder) if "session" in record]
    assert [session.get("new_phase") for session in sessions] == [None, True]
    assert json.loads((folder / "ending.json").read_text()) == {"ending": "finished", "step": STEPS, "steps": STEPS}


def test_a_head_to_be_fine_tuned_begins_with_the_training_free_bias(tmp_path: Path) -> None:
    write_text(tmp_path)
    source = trained(tmp_path, 1, {"objective.schedule": None})
    begun = {
        "init": {"from_checkpoint": str(source)},
        "objective": {"name": "vanilla", "output_bias": True},
        "optimizer.learning_rate": 1e-12,
        "training.steps": 1,
        "schedule.warmup_steps": 0,
        "output_dir": str(tmp_path / "tuned"),
    }
    (ending,) = on_ranks(1, run, small_config(tmp_path, begun))
    assert ending == "finished"
    expected = read_metrics(source).validation[-1]["loss"]
    assert read_metrics(tmp_path / "tuned").validation[-1]["loss"] == pytest.approx(expected, abs=1e-6)
