"""Encoders that learn next tokens first and masked ones then: one run, whose parts are ordinary runs."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import BatchReader, held_out_collator, training_collator
from megahead.data.samples import ConcatenatedSamples
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.estimate import run_flops
from megahead.evaluate.perplexity import ValidationSet, evaluate_checkpoint, open_held_out
from megahead.hf.export import export
from megahead.hf.trained import TrainedModel
from megahead.losses.candidates import log_unigram
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.bad_rows import run_with
from support.long import long
from support.named import folder_of, without_digits
from support.on_ranks import on_ranks
from support.plain_phases import plain_phases
from support.small_run import one_step_more, same_tensors, small_config, stage, write_text

STEPS, SWITCH = 8, 3
AROUND = [SWITCH - 1, SWITCH, SWITCH + 1]
IDS = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
MODEL = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "vocab_multiple": 64}
MODERNBERT = {"family": "modernbert", "intermediate_size": 64, "max_positions": 32, "local_window": 6}
BERT = {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32}
FIRST: dict[str, Any] = {"objective.schedule": {"causal_share": 3 / 8}}
BOTH: dict[str, Any] = {"objective.schedule": {"causal_share": 3 / 8, "vanilla_share": 2 / 8}}
VANILLA = {"objective": {"name": "vanilla", "tied": True, "schedule": {"causal_share": 3 / 8}}}
ROWS = {"engine.embedding": "rows"}


def encoder(folder: Path, changes: dict[str, Any]) -> RunConfig:
    fixed = {
        "model": {**MODEL, **MODERNBERT},
        "masking": IDS | {"rate": 0.3},
        **{"optimizer.eps": 1e-4, "optimizer.gradient_clipping": 0.5},
        "batch.global_size": 4,
        **{"training.steps": STEPS, "training.checkpoint_every": 1, "training.evaluate_every": 100},
    }
    return small_config(folder, fixed | FIRST | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    try:
        return pretrain(config, Launch(), resume).ending
    except UserError as error:
        return str(error)


def trained(folder: Path, ranks: int, changes: dict[str, Any], resume: str = "auto") -> Path:
    """A run's folder once it has ended."""
    config = encoder(folder, changes)
    assert on_ranks(ranks, run, config, resume) == ["finished"] * ranks
    return Path(config.folder())


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def zero(number: int) -> dict[str, Any]:
    return {"engine.deepspeed": {"zero_optimization": {"stage": number, "stage3_param_persistence_threshold": 0}}}


@pytest.mark.parametrize(
    ("number", "tensor", "data", "changes"),
    [
        (0, 1, 1, {"masking.final_rate": 0.5}),
        long(2, 2, 2, {"parallel.sequence": True, "engine.activation_checkpointing": True}),
        (1, 1, 2, ROWS | BOTH),
        long(3, 1, 2, ROWS | BOTH),
        long(1, 2, 1, VANILLA | {"model": {**MODEL, **BERT}, "engine.attention": "sdpa"}),
    ],
    ids=["alone", "sequence", "rows, then vanilla", "3 in rows, then vanilla", "bert, vanilla"],
)
def test_all_phases_equal_plain_torch(
    tmp_path: Path, number: int, tensor: int, data: int, changes: dict[str, Any]
) -> None:
    """Weights and moments go on, learned causally or not."""
    write_text(tmp_path)
    reference = plain_phases(encoder(tmp_path, changes))
    folder = trained(tmp_path, tensor * data, zero(number) | {"parallel.tensor": tensor} | changes)
    curve, newest = read_metrics(folder).training, open_checkpoint(folder)
    assert [record["loss"] for record in curve] == pytest.approx(reference.losses, abs=3e-6)
    assert [record["gradient_norm"] for record in curve] == pytest.approx(reference.norms, rel=1e-5)
    for name, weight in reference.weights.items():
        torch.testing.assert_close(newest.read(name), weight, rtol=0, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("ranks", "changes", "steps"),
    [
        (1, stage(0) | {"training.save_in_background": True}, AROUND),
        long(2, stage(2) | BOTH | ROWS | {"engine.precision": "bf16"}, [SWITCH]),
        long(2, stage(2) | BOTH | ROWS | {"engine.precision": "bf16"}, AROUND),
        long(4, stage(1) | VANILLA | {"parallel.tensor": 2}, AROUND),
    ],
    ids=["0", "2 in bf16 and rows", "2 in bf16 and rows, everywhere", "1 on a mesh"],
)
def test_a_resumed_run_equals_the_undisturbed_one_bitwise(
    tmp_path: Path, ranks: int, changes: dict[str, Any], steps: list[int]
) -> None:
    """From before the switch, at it, and after it."""
    write_text(tmp_path)
    whole = trained(tmp_path, ranks, changes)
    for step in steps:
        elsewhere = changes | {"output_dir": str(tmp_path / f"{step}")}
        again = trained(tmp_path, ranks, elsewhere, str(folder_of(whole, step)))
        assert same_tensors(whole, again), step


@pytest.mark.long
def test_a_run_stopped_after_each_step_equals_the_undisturbed_one_bitwise(tmp_path: Path) -> None:
    """With a rate of masks that moves from the switch on, wherever the run goes on."""
    write_text(tmp_path)
    moving = {"masking": IDS | {"rate": 0.5, "final_rate": 0.1}}
    whole = trained(tmp_path, 1, moving)
    counted = [0, *(open_checkpoint(folder_of(whole, step)).state["targets"] for step in range(SWITCH + 1, STEPS + 1))]
    assert [b - a for a, b in pairwise(counted)] == [4 * round(22 * rate) for rate in (0.5, 0.4, 0.3, 0.2, 0.1)]
    for ending in ["out of time"] * (STEPS - 1) + ["finished"]:
        assert on_ranks(1, run, encoder(tmp_path, moving | one_step_more(tmp_path / "often"))) == [ending]
    assert open_checkpoint(tmp_path / "often").step == STEPS
    assert same_tensors(whole, tmp_path / "often")


def masked_loss(folder: Path) -> float:
    """Of a causal checkpoint's weights where they see both sides, before a masked token was a target."""
    causal = TrainedModel.open(folder)
    config = causal.config.model_copy(update={"model": causal.config.model.model_copy(update={"is_causal": False})})
    pretraining = TrainedModel(causal.checkpoint, config, causal.shapes).load()
    bias_V = log_unigram(torch.zeros(64), 63, causal.dataset_counts())
    rows, collator = config.training.evaluate_samples, held_out_collator(config)
    held_out = ValidationSet(open_held_out(config), collator, rows, 16, Group())
    with torch.no_grad():
        return held_out.evaluate(pretraining, bias_V, torch.device("cpu")).loss


def test_next_tokens_are_learned_and_held_out_then_masked_ones(tmp_path: Path) -> None:
    """Held-out losses before and behind the switch are of the same weights, and of other targets."""
    write_text(tmp_path)
    longer = {"training.steps": 60, "training.checkpoint_every": 40, "training.evaluate_samples": 200}
    longer |= {"objective.schedule": {"causal_share": 2 / 3}, "optimizer.learning_rate": 1e-2}
    longer |= {"batch.global_size": 16, "batch.micro_size": 16}
    folder = trained(tmp_path, 1, longer)
    found = [record for record in records(folder) if "validation" in record]
    assert [record["step"] for record in found] == [40, 40, 60]
    before, at_switch, last = (record["validation"] for record in found)
    assert before["loss"] < math.log(60) - 1  # three likely successors, of 60 ids
    assert last["loss"] < at_switch["loss"] - 0.1
    scored = [evaluate_checkpoint(folder_of(folder, step), "pmi").loss for step in (40, 60)]
    assert scored == pytest.approx([before["loss"], last["loss"]], abs=1e-5)
    assert at_switch["loss"] == pytest.approx(masked_loss(folder_of(folder, 40)), abs=1e-5)


def test_targets_are_counted_anew_behind_the_switch(tmp_path: Path) -> None:
    """Else the training-free head would say of masked tokens how often ids are next ones: end tokens never are."""
    write_text(tmp_path)
    folder = trained(tmp_path, 1, {})
    config = encoder(tmp_path, {})
    samples = ConcatenatedSamples(IndexedDataset(config.data.train), config.sample_length(), config.seed)
    for step, first in ((SWITCH, 0), (STEPS, SWITCH)):
        found = open_checkpoint(folder_of(folder, step))
        collator = training_collator(TrainedModel.from_checkpoint(found).config, [])
        size = config.batch.global_size
        expected = torch.zeros(64, dtype=torch.int64)
        for number in range(first, step):
            rows = range(number * size, (number + 1) * size)
            ids = BatchReader(samples, collator).read(rows).target_ids_N
            expected += torch.bincount(ids, minlength=64)
        assert torch.equal(found.read("state/target_counts"), expected)
        assert (int(expected[0]) > 0) == (step == SWITCH)
        assert found.state["targets"] == int(expected.sum())
        assert found.state["target_samples"] == (step - first) * size


def test_what_each_phase_has_ended_with_is_kept(tmp_path: Path) -> None:
    """To be evaluated and fine-tuned beside the end."""
    write_text(tmp_path)
    folder = trained(tmp_path, 1, BOTH | {"training.keep_checkpoints": 1})
    kept = sorted(without_digits(path.name) for path in (folder / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (SWITCH, 6, STEPS)]


def test_an_export_is_of_what_the_encoder_is_by_then(tmp_path: Path) -> None:
    """Compared with the checkpoint before it appears: a decoder at the switch, an encoder at the end."""
    write_text(tmp_path)
    folder = trained(tmp_path, 1, {})
    ids = torch.arange(1, 13)[None]
    changed = ids.index_fill(1, torch.tensor([9]), 40)
    for step, kind in ((SWITCH, AutoModelForCausalLM), (STEPS, AutoModelForMaskedLM)):
        report = export(folder_of(folder, step), tmp_path / f"{step}", "pmi")
        assert report.parity.compared == "logits"
        model = kind.from_pretrained(report.folder)
        apart = (model(ids).logits[0, :9] - model(changed).logits[0, :9]).abs().max()
        assert (apart == 0) == (step == SWITCH)


def test_another_run_masks_what_a_causal_one_has_learned(tmp_path: Path) -> None:
    """As the second phase does, but with an optimizer and a course of its own."""
    write_text(tmp_path)
    source = trained(tmp_path, 1, {"objective.schedule": None, "model.is_causal": True, "masking": IDS})
    assert TrainedModel.open(source).config.model.is_causal
    init = {"init": {"from_checkpoint": str(source), "mode": "continue"}, "objective.schedule": None}
    still = {"training.steps": 1, "schedule.warmup_steps": 0, "optimizer.learning_rate": 1e-12}
    again = trained(tmp_path, 1, init | still | {"output_dir": str(tmp_path / "masked")})
    first, last = open_checkpoint(source), open_checkpoint(again)
    assert not TrainedModel.from_checkpoint(last).config.model.is_causal
    for name in (name for name in first.names() if name.startswith("weight/")):
        torch.testing.assert_close(last.read(name), first.read(name), rtol=0, atol=1e-9)
    export(again, tmp_path / "out", "pmi")


def test_the_switch_stays_where_it_was(tmp_path: Path) -> None:
    write_text(tmp_path)
    whole = trained(tmp_path, 1, {})
    behind = STEPS
    moved = [(SWITCH, 1 / 8, 0, "0 to step 1"), (SWITCH + 1, 7 / 8, SWITCH, "7 to step 8")]
    for step, share, began, span in [*moved, (behind, (SWITCH + 1) / STEPS, SWITCH, f"{SWITCH + 1} to step {STEPS}")]:
        elsewhere = encoder(tmp_path, {"objective.schedule": {"causal_share": share}})
        (sentence,) = on_ranks(1, run, elsewhere, str(folder_of(whole, step)))
        assert sentence == (
            f"`objective.schedule` must have the phase that saved {folder_of(whole, step)} from step {began} to at "
            f"least step {step}, but has it from step {span} instead; set training.steps or the share back."
        )
    (sentence,) = on_ranks(1, run, encoder(tmp_path, {"training.steps": 2 * STEPS}), str(folder_of(whole, STEPS)))
    assert f"from step {SWITCH} to at least step {STEPS}, but has it from step {2 * SWITCH} " in sentence
    (sentence,) = on_ranks(1, run, encoder(tmp_path, {"objective.schedule": None}), str(folder_of(whole, SWITCH)))
    assert "differs in model.is_causal (was True, is False)" in sentence


def test_a_rollback_goes_to_the_switch_and_counts_anew_there(tmp_path: Path) -> None:
    write_text(tmp_path)
    bad = (4 * SWITCH,)
    skipped, back = (
        encoder(tmp_path, {"faults.bad_step": policy, "output_dir": str(tmp_path / policy)})
        for policy in ("skip", "rollback")
    )
    for config in (skipped, back):
        assert on_ranks(1, run_with, config, math.nan, bad) == ["finished"]
    (rollback,) = (record["rollback"] for record in records(tmp_path / "rollback") if "rollback" in record)
    assert without_digits(rollback["checkpoint"]) == f"step-{SWITCH:08d}"
    assert same_tensors(tmp_path / "rollback", tmp_path / "skip")
    counts = [open_checkpoint(tmp_path / name).read("state/target_counts") for name in ("rollback", "skip")]
    assert torch.equal(*counts)


def test_banner_log_and_speed_are_those_of_each_phase(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path)
    folder = trained(tmp_path, 1, BOTH)
    told = capfd.readouterr().out
    sentence = "headless on next tokens for 3 steps, then headless on masked tokens for 3 steps, "
    assert told.count(f"phases      {sentence}then vanilla (untied, with a bias) on masked tokens for 2 steps") == 3
    assert "objective   headless, candidates from 2 rows (44 targets), next tokens by causal attention" in told
    assert "objective   headless, candidates from 2 rows (14 targets), 30% of the tokens masked" in told
    sessions = [record["session"] for record in records(folder) if "session" in record]
    assert [session.get("new_phase") for session in sessions] == [None, True, True]
    steps = read_metrics(folder).training
    for step in (SWITCH, SWITCH + 1):
        record, phase = steps[step - 1], TrainedModel.open(folder_of(folder, step)).config
        flops = run_flops(phase, round(record["candidates"])).total * record["tokens_per_second"]
        assert record["flops_per_second"] == pytest.approx(flops, rel=1e-6)
