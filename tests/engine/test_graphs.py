"""Captured micro-steps train what uncaptured ones do: on a CPU, whose graphs are recorded operators, replayed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.engine import engine as engine_module
from megahead.engine import graphs
from megahead.engine.graphs import describe_graphs
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.bad_rows import run_with
from support.long import long
from support.on_ranks import on_ranks
from support.recorded_graph import RecordedGraphs
from support.small_engine import SmallBatch, SmallModel, small_batches, small_engine
from support.small_run import offloaded, same_tensors, small_config, stage, write_text

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GRAPHS = {"engine.graphs": True, "engine.attention": "sdpa"}
MASKS = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
ENCODER = {"model.family": "bert", "model.vocab_size": 63, "model.max_positions": 32, "masking": MASKS}
NO_DROPOUT = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
BF16 = {"engine.precision": "bf16"}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    """What captures on this CPU, instead of running micro-steps again."""
    recorder = RecordedGraphs()
    monkeypatch.setattr(engine_module, "build_capture", lambda device: recorder)
    return recorder


def trained(folder: Path, changes: dict[str, Any], name: str, resume: str = "auto") -> list[float]:
    """The losses of the run `folder`/NAME."""
    config = small_config(folder, {"output_dir": str(folder / name), "engine.attention": "sdpa"} | changes)
    pretrain(config, resume=resume)
    return [record["loss"] for record in read_metrics(folder / name).training]


SAME_SHAPES = {"objective.name": "vanilla", "data.isolate_documents": False}
"""Nothing is padded: each output has a target, and all ids compete."""


@pytest.mark.parametrize(
    "changes",
    [
        stage(0),
        stage(1),
        stage(1) | BF16,
        long(stage(0) | BF16),
        long(stage(1) | BF16 | {"optimizer.name": "muon"}),
        long(stage(0) | {"batch.micro_size": 8}),
    ],
    ids=str,
)
def test_a_captured_run_is_the_uncaptured_one_bit_for_bit(
    tmp_path: Path, changes: dict[str, Any], recorded: RecordedGraphs
) -> None:
    """Evaluation, checkpoints and further replays follow each other. Six steps of four micro-batches (or of one)."""
    write_text(tmp_path)
    changes = SAME_SHAPES | {"training.evaluate_every": 2} | changes
    plain = trained(tmp_path, changes, "plain")
    assert recorded.replays == 0
    assert trained(tmp_path, changes | GRAPHS, "captured") == plain
    assert same_tensors(tmp_path / "captured", tmp_path / "plain")
    micro_batches = 6 if "batch.micro_size" in changes else 24
    assert (recorded.captures, recorded.replays) == (1, micro_batches - graphs.WARM_UP)


@pytest.mark.parametrize(
    "changes",
    [
        long({}),
        long({"batch.micro_size": 4, "objective.group_samples": 1}),
        long({"objective.group_samples": 8, "data.boundary_targets": False}),
        {"batch.micro_size": 4, "objective.group_samples": 2, "data.boundary_targets": False, **stage(1), **BF16},
        {"objective.name": "vanilla", "objective.tied": True, "data.boundary_targets": False, **stage(1)},
        long({"model.family": "llama", "objective.bias": "once", "objective.learned_temperature": True}),
        {"objective": {"bias": "corrected", "max_candidates": 12, "negatives": 4}, "batch.micro_size": 8},
        ENCODER | NO_DROPOUT | {"batch.micro_size": 4, "objective.group_samples": 2},
        long(ENCODER | NO_DROPOUT | {"objective.name": "vanilla", **stage(1), **BF16}),
    ],
    ids=str,
)
def test_padding_to_few_shapes_changes_a_run_by_rounding_alone(
    tmp_path: Path, changes: dict[str, Any], recorded: RecordedGraphs
) -> None:
    write_text(tmp_path)
    changes = changes | {"training.steps": 12, "training.evaluate_every": 12}
    plain, captured = trained(tmp_path, changes, "plain"), trained(tmp_path, changes | GRAPHS, "captured")
    assert captured == pytest.approx(plain, rel=2e-3 if "engine.precision" in changes else 1e-5)
    assert captured[:1] == pytest.approx(plain[:1], rel=1e-6)
    assert 1 <= recorded.captures <= 4
    assert recorded.replays >= 6


def captured_losses(group: Group, config: RunConfig) -> tuple[list[float], int]:
    recorder = RecordedGraphs()
    engine_module.build_capture = lambda device: recorder
    pretrain(config, Launch())
    return [record["loss"] for record in read_metrics(Path(config.output_dir)).training], recorder.replays


@pytest.mark.parametrize("changes", [long(stage(0)), long(stage(1)), stage(1) | BF16], ids=str)
def test_two_ranks_reduce_what_their_graphs_sum(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_text(tmp_path)
    changes = SAME_SHAPES | {"engine.attention": "sdpa"} | changes
    plain = small_config(tmp_path, changes | {"output_dir": str(tmp_path / "plain")})
    captured = small_config(tmp_path, changes | GRAPHS | {"output_dir": str(tmp_path / "captured")})
    (expected, none), _ = on_ranks(2, captured_losses, plain)
    (losses, replays), _ = on_ranks(2, captured_losses, captured)
    assert losses == expected
    assert (none, replays) == (0, 12 - graphs.WARM_UP)
    assert same_tensors(tmp_path / "captured", tmp_path / "plain")


@pytest.mark.parametrize("changes", [long({}), stage(1) | BF16, long(stage(1))], ids=str)
def test_a_resumed_captured_run_is_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, changes: dict[str, Any], recorded: RecordedGraphs
) -> None:
    """Warm-up begins anew: what a graph replays is what runs uncaptured."""
    write_text(tmp_path)
    whole = trained(tmp_path, GRAPHS | changes, "whole")
    half = str(tmp_path / "whole/checkpoints/step-00000003")
    assert trained(tmp_path, GRAPHS | changes, "resumed", half) == whole[3:]
    assert same_tensors(tmp_path / "whole", tmp_path / "resumed")
    assert recorded.replays


def recorded_bad_run(group: Group, config: RunConfig) -> tuple[str, int, bool]:
    """The ending of a run with a loss that is nan, how often it captured, and whether it replayed many steps."""
    recorder = RecordedGraphs()
    engine_module.build_capture = lambda device: recorder
    return run_with(group, config, float("nan")), recorder.captures, recorder.replays > 12


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        long(stage(0), "skip"),
        (stage(0), "rollback"),
        (stage(1) | BF16, "skip"),
        long(stage(1) | BF16, "rollback"),
        long(stage(1), "skip"),
        long(stage(1), "rollback"),
    ],
    ids=str,
)
def test_a_bad_step_leaves_no_gradients_and_a_rollback_captures_anew(
    tmp_path: Path, changes: dict[str, Any], action: str
) -> None:
    write_text(tmp_path)
    changes = SAME_SHAPES | changes | {"engine.attention": "sdpa", "faults.bad_step": action}
    plain, captured = (
        on_ranks(1, recorded_bad_run, small_config(tmp_path, changes | more | {"output_dir": str(tmp_path / name)}))
        for name, more in (("plain", {}), ("captured", GRAPHS))
    )
    assert plain == [("finished", 0, False)]
    assert captured == [("finished", 2 if action == "rollback" else 1, True)]
    assert same_tensors(tmp_path / "captured", tmp_path / "plain")


def test_further_shapes_run_uncaptured(
    tmp_path: Path, recorded: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with and without the end of a document."""
    write_text(tmp_path)
    both = trained(tmp_path, GRAPHS, "both")
    assert (recorded.captures, recorded.replays > 10) == (2, True)
    replays = recorded.replays
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    with pytest.warns(UserWarning, match="are not captured: they have more than 1 shapes"):
        assert trained(tmp_path, GRAPHS, "one") == both
    assert (recorded.captures, 0 < recorded.replays - replays < replays) == (3, True)
    assert same_tensors(tmp_path / "one", tmp_path / "both")


@pytest.mark.parametrize("changes", [long(stage(0)), stage(1) | BF16], ids=str)
def test_a_capture_that_fails_is_said_once_and_the_run_goes_on(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(micro_step: graphs.MicroStep) -> graphs.MicroStep:
        try:
            raise torch.OutOfMemoryError("no memory for it\nand so on")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")  # as torch.cuda.graph does

    write_text(tmp_path)
    plain = trained(tmp_path, SAME_SHAPES | changes, "plain")
    monkeypatch.setattr(engine_module, "build_capture", lambda device: failing)
    with pytest.warns(UserWarning, match="not captured") as told:
        assert trained(tmp_path, SAME_SHAPES | changes | GRAPHS, "failing") == plain
    assert [str(warning.message) for warning in told] == ["further micro-batches are not captured: no memory for it"]


def test_a_cpu_runs_micro_steps_on_static_inputs(tmp_path: Path) -> None:
    """Without the recorder, and with the attention of CPUs, whose lengths the host reads."""
    write_text(tmp_path)
    documents = {"engine.attention": "documents"}
    plain = trained(tmp_path, documents, "plain")
    assert trained(tmp_path, documents | {"engine.graphs": True}, "static") == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel.tensor": 2}, "tensor ranks communicate"),
        (stage(2), "ZeRO 2 communicates"),
        (stage(3), "ZeRO 3 communicates"),
        ({"engine.embedding": "rows"}, "each step fetches other rows"),
        (stage(1) | {"engine.precision": "fp16"}, "fp16's loss scale"),
        (ENCODER, "dropout draws new masks"),
        ({"engine.activation_checkpointing": True}, "recomputation saves"),
        (ENCODER | NO_DROPOUT | {"objective.replaced_tokens": {"generator_layers": 1}}, "an auxiliary objective"),
        (ENCODER | NO_DROPOUT | {"objective.phrases": {"group_samples": 2}}, "an auxiliary objective"),
        (ENCODER | NO_DROPOUT | {"masking": MASKS | {"strategy": "hardest"}}, "adaptive masking"),
        (ENCODER | NO_DROPOUT | {"masking": MASKS | {"masks_from_layer": 1}}, "some layers compute a part"),
        (ENCODER | NO_DROPOUT | {"masking": MASKS | {"dropping": {"from_layer": 0}}}, "some layers compute a part"),
        (offloaded(1) | BF16, "DeepSpeed handles gradients in hooks"),
    ],
    ids=str,
)
def test_why_a_run_is_not_captured_is_said(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    plan = RunPlan.of(small_config(tmp_path, {"engine.graphs": True} | changes), 2, "cpu")
    assert not plan.uses_cuda_graphs()
    ((name, line),) = describe_graphs(plan)
    assert (name, line.startswith(f"no, {reason}")) == ("graphs", True), line


def test_graphs_are_captured_where_they_are_asked_for(tmp_path: Path) -> None:
    def told(asked: Any, device: torch.device, **changes: Any) -> tuple[bool, list[tuple[str, str]]]:
        changes = {"engine.graphs": asked} | stage(1) | BF16 | changes
        plan = RunPlan.of(small_config(tmp_path, changes), 1, device.type)
        return plan.uses_cuda_graphs(), describe_graphs(plan)

    assert told(False, CUDA) == told(False, CPU) == told("auto", CPU) == (False, [])
    one_each = [("graphs", "one for each shape of a micro-batch, 8 at most")]
    assert told("auto", CUDA) == told(True, CUDA) == (True, one_each)
    assert told(True, CPU) == (True, [("graphs", "static inputs alone, since a CPU has no graphs")])
    hooks = [("graphs", "no, DeepSpeed handles gradients in hooks")]
    assert told(True, CUDA, **{"engine.precision": "fp32"}) == (
        False,
        hooks,
    )  # in fp32 its buckets overlap with the backward pass
    host = [("graphs", "no, its attention reads lengths on the host")]
    assert told("auto", CUDA, **{"engine.attention": "documents"}) == (False, host)
    assert small_config(tmp_path).engine.graphs is False


def living_accumulators(group: Group, stage: int, precision: str) -> int:
    """How many of a micro-step's AccumulateGrad nodes are there after it."""
    marked = SmallModel()
    forward, parameters = marked.forward, list(marked.parameters())

    def metadata(parameter: nn.Parameter) -> dict[Any, Any]:
        data: dict[Any, Any] = parameter.expand_as(parameter).grad_fn.next_functions[0][0].metadata  # type: ignore[union-attr]
        return data

    def marking_forward(batch: SmallBatch) -> torch.Tensor:
        loss = forward(batch)
        for parameter in parameters:
            metadata(parameter)["mark"] = True
        assert all("mark" in metadata(parameter) for parameter in parameters)
        return loss

    marked.forward = marking_forward  # type: ignore[method-assign, assignment]
    engine = small_engine(group, stage, precision, module=marked)
    engine.micro_step(small_batches([8], 1.0, seed=0)[0])
    gc.collect()
    return sum("mark" in metadata(parameter) for parameter in parameters)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16")])
def test_nothing_keeps_the_accumulators_of_gradients(stage: int, precision: str) -> None:
    """They run on the stream on which they were created: none may be left for a capture on another stream."""
    assert on_ranks(1, living_accumulators, stage, precision) == [0]


def hooked(group: Group, precision: str, zero: dict[str, Any], deepspeed: dict[str, Any]) -> bool:
    engine = small_engine(group, 1, precision, zero=zero, deepspeed=deepspeed)
    return bool(engine._deepspeed.optimizer._grad_acc_hooks)


@pytest.mark.parametrize(
    ("precision", "zero", "deepspeed", "has_hooks"),
    [
        ("fp32", {}, {}, False),
        ("fp32", {"contiguous_gradients": True}, {}, True),
        ("bf16", {}, {}, False),
        ("bf16", {}, {"bf16": {"immediate_grad_update": True}}, True),
        ("bf16", {"offload_optimizer": {"device": "cpu"}}, {"zero_force_ds_cpu_optimizer": False}, True),
    ],
    ids=str,
)
def test_where_deepspeed_has_hooks_is_known_before_it_starts(
    tmp_path: Path, precision: str, zero: dict[str, Any], deepspeed: dict[str, Any], has_hooks: bool
) -> None:
    assert on_ranks(1, hooked, precision, zero, deepspeed) == [has_hooks]
    content = deepspeed | {"zero_optimization": {"stage": 1, **zero}}
    plan = RunPlan.of(small_config(tmp_path, {"engine.deepspeed": content, "engine.precision": precision}), 1, "cpu")
    assert bool(plan.graphs_unsupported_reason()) is has_hooks
