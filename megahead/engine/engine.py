"""The engine: backward pass, reduction, clipping and the optimizer step by DeepSpeed at ZeRO 0 to 3.

Shape suffixes: U rows that this rank fetches, O rows of this rank that any rank fetches.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import FullTensors, MappedTensors, RoundRobinShard, TensorSource
from megahead.engine.deepspeed import (
    allocate_,
    check_half_precision,
    half_dtype,
    start_deepspeed,
    sum_gradients_after_backward,
)
from megahead.engine.graphs import CapturedMicroStep, GradientSums, build_capture
from megahead.engine.muon import gather_for_muon
from megahead.engine.state import MOMENTS, WEIGHT, FullState, moment_names, open_parameter_states
from megahead.models.parallel import shard_dims
from megahead.objectives.pretraining import load_weights_
from megahead.optim import Muon, set_learning_rate
from megahead.sharded_embedding.table import GRAD_NORM_PROXY_SIZE, RowPlan, ShardedEmbedding


class ForwardTimer:
    """Sums the seconds of forward passes; on a GPU by events, without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Adds the time of a forward pass, in the block."""
        if not self._on_gpu:
            start_seconds = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start_seconds
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((start, end))

    def pop_seconds(self) -> float:
        """The seconds since the last call. On a GPU raises RuntimeError unless the host has synchronized with the last
        forward pass, for example by reading its loss."""
        for start, end in self._events:
            self._seconds += start.elapsed_time(end) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds


# The global gradient norm and clipping at ZeRO stage 0.
#
# DeepSpeed's own clipping there does not return the norm, and applies a step whose gradients are not finite.


def global_norm(parameters: Sequence[nn.Parameter], tensor_group: Group) -> Tensor:
    """L2 norm of all gradients over the tensor ranks; [] on their device. One collective, without synchronizing.
    Gradients of parameters with `model_parallel = True` are sharded over the tensor ranks, others are replicated."""
    sharded: list[Tensor] = []
    replicated: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            (sharded if getattr(parameter, "model_parallel", False) else replicated).append(parameter.grad)
    gradients = sharded + replicated if tensor_group.rank == 0 else sharded
    squared = get_total_norm(gradients).square() if gradients else parameters[0].new_zeros(())
    return tensor_group.all_reduce_(squared).sqrt()


def clip_gradients_(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scales all gradients in place so that their global norm `norm` becomes at most `max_norm` (0: no limit)."""
    if 0 < max_norm < norm:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


# Discards accumulated gradients, so that the next step starts without any.
#
# DeepSpeed does this only inside a step that it does not apply, and incompletely: with an offloaded optimizer (stages 1
# and 2) it keeps the fp32 sums of half-precision gradients, so that every later step adds to sums that are not finite.
# This discards all gradients that its optimizers (0.19) keep between two steps, on any device.


def discard_gradients(optimizer: Any, stage: int) -> None:
    """Discards all gradients that `optimizer`, a DeepSpeedEngine's at ZeRO `stage`, accumulated since its last step.
    Does not change weights, moments and loss scale. Sends nothing, but every rank must call it."""
    optimizer.zero_grad()
    if stage == 3:  # the calls of DeepSpeed's step when it does not apply the update, in the same order
        optimizer._pre_step()
        optimizer._partition_all_parameters()
        optimizer._overflow_clean_up(optimizer.loss_scale)
    elif hasattr(optimizer, "averaged_gradients"):  # not at stage 0, nor in the bf16 optimizer of stage 1
        optimizer.micro_step_id = -1  # the next gradients replace the present ones instead of being added
        for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()  # waits for copies to the host; clears their norms and overflow flags


_SCALER_ATTRIBUTES = frozenset({"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"})
"""Attributes of DeepSpeed's `DynamicLossScaler` that change during training."""


class LossScale:
    """The loss scale of DeepSpeed's `optimizer`; 1 in other precisions than fp16."""

    def __init__(self, optimizer: Any) -> None:
        self._scaler = getattr(optimizer, "loss_scaler", None)
        if self.is_dynamic:
            self._scaler.raise_error_at_min_scale = False  # type: ignore[union-attr] # `FaultPolicy` decides

    @property
    def value(self) -> float:
        """The current scale."""
        return float(getattr(self._scaler, "cur_scale", 1.0))

    @property
    def is_dynamic(self) -> bool:
        """Whether overflows are expected, and lower the scale."""
        return bool(getattr(self._scaler, "dynamic", False))

    def state(self) -> dict[str, float]:
        """The state of a dynamic loss scale for a checkpoint; empty for others."""
        return {name: getattr(self._scaler, name) for name in _SCALER_ATTRIBUTES} if self.is_dynamic else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Sets the values in `state`, the inverse of `state()`; others do not change."""
        if self.is_dynamic:
            for name in _SCALER_ATTRIBUTES & state.keys():
                setattr(self._scaler, name, state[name])


# Optimizer steps at any ZeRO stage, and the complete state by tensor name (`FullState`).
#
# The engine guarantees at every stage what DeepSpeed does only at some: it returns the gradient norm, a step with
# gradients that are not finite on any rank changes nothing, and a new engine with loaded state continues bitwise.


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping; inf or nan when the step was not applied."""

    applied: bool
    """False if gradients were not finite (or overflowed in fp16), or the step was skipped: nothing has changed."""


class Engine:
    """Trains `module` under DeepSpeed by micro-steps and optimizer steps. Building one is collective.

    `module(batch)` returns a loss scaled as `sum * data_ranks * accumulation / global_targets`, with a gradient for
    every trainable parameter. `optimizer` is an `AdamW` or a `Muon` over the module's trainable parameters, `config`
    is `RunPlan.deepspeed`. At stage 3 the module's parameters are empty outside of its forward; `tensors()` has them.

    `weights` has the full (unsharded) initial tensors by parameter name. They are read one at a time: `module` may be
    unallocated (see `build_parallel_model`), so that at stage 3 no rank has the full model in memory.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        mesh: Mesh,
        device: torch.device,
        weights: TensorSource,
    ) -> None:
        self._stage = int(config.get("zero_optimization", {}).get("stage", 0))
        self._clipping = float(config.get("gradient_clipping", 0.0))
        check_half_precision(config, self._stage)
        if self._stage == 0:
            config = {**config, "gradient_clipping": 0.0}  # `_step_replicated` clips
        self._mesh = mesh
        is_half = half_dtype(config) is not None  # weights are set below, after DeepSpeed has rounded the parameters
        if self._stage < 3:
            allocate_(module) if is_half else load_weights_(module, mesh.tensor_group, weights)
        moments = {p: moment_names(group) for group in optimizer.param_groups for p in group["params"]}
        self._deepspeed = start_deepspeed(module, optimizer, config, mesh, device)
        sum_gradients_after_backward(self._deepspeed.optimizer)
        self._reduces_gradients = self._stage < 2 and not hasattr(self._deepspeed.optimizer, "reduce_gradients")
        # if true, `micro_step` reduces them: DeepSpeed's backward pass would ignore the bucket size
        self._deepspeed.enable_backward_allreduce = not self._reduces_gradients
        states, dims = open_parameter_states(self._deepspeed, self._stage, mesh.data_group), shard_dims(module)
        parameters = self._saved_parameters()
        self._full_state = FullState(parameters, moments, states, dims, mesh.tensor_group, self._deepspeed.device)
        if isinstance(optimizer, Muon):
            dim_by_parameter: dict[Tensor, int] = {module.get_parameter(name): dim for name, dim in dims.items()}
            gather_for_muon(self._deepspeed, optimizer, self._stage, mesh, dim_by_parameter)
        self.loss_scale = LossScale(self._deepspeed.optimizer)
        self._backward_done = False
        self._captured: CapturedMicroStep | None = None
        self.forward_timer = ForwardTimer(device)
        self._grad_norm: Tensor | None = None
        if self._stage == 3 or is_half:
            self._full_state.set(WEIGHT, lambda key: weights.read(key.removeprefix(f"{WEIGHT}/")))

    @property
    def module(self) -> nn.Module:
        """The module, without DeepSpeed's wrapper."""
        module: nn.Module = self._deepspeed.module
        return module

    def prepare_step(self, rows: RowPlan | None) -> dict[str, float]:
        """Must be called before the micro-steps of a step. A `ShardedEmbeddingEngine` fetches the embedding rows that
        the step needs (`rows`) and returns their metrics by name; this engine does nothing."""
        return {}

    def capture_micro_steps(self) -> CapturedMicroStep:
        """Runs micro-steps as CUDA graphs from now on, which need batches of static shapes; returns the
        `CapturedMicroStep`."""
        sums = GradientSums(self._deepspeed.optimizer, self.module.parameters())
        self._captured = CapturedMicroStep(self._run_micro_batch, sums, lambda: build_capture(self._deepspeed.device))
        self._reduces_gradients, self._deepspeed.enable_backward_allreduce = True, False
        return self._captured

    def micro_step(self, batch: Any) -> Tensor:
        """Runs forward and backward of one micro-batch; returns the module's loss, detached. Collective."""
        if self._captured is None:
            loss = self._run_micro_batch(batch, self.forward_timer)
        else:
            with self.forward_timer.measure():  # includes the backward pass: one graph holds both
                loss = self._captured(batch)
        self._backward_done = self._deepspeed.is_gradient_accumulation_boundary()
        if self._backward_done and self._reduces_gradients:
            self._deepspeed.allreduce_gradients(self._deepspeed.zero_reduce_bucket_size())
        if self._backward_done and self._stage == 0:  # launched before the host synchronizes to read the losses
            self._grad_norm = global_norm([*self.module.parameters()], self._mesh.tensor_group)
        if not self._backward_done:
            self._deepspeed.step()  # increments the micro-step count
        return loss

    def _run_micro_batch(self, batch: Any, timer: ForwardTimer | None = None) -> Tensor:
        """Forward and backward, without the reduction of gradients; returns the loss, detached."""
        with nullcontext() if timer is None else timer.measure():
            loss: Tensor = self._deepspeed(batch)
        self._deepspeed.backward(loss)
        return loss.detach()

    def step(self, learning_rate: float) -> StepResult:
        """Updates the weights after `gradient_accumulation_steps` micro-steps, unless the gradient norm is not finite.
        Collective, and synchronizes with the device to read the gradient norm."""
        self._end_accumulation()
        set_learning_rate(self._deepspeed.optimizer.param_groups, learning_rate)
        return self._step_replicated() if self._stage == 0 else self._step_partitioned()

    def skip_step(self) -> StepResult:
        """Discards the accumulated gradients, instead of `step`; weights and state (also fp16's loss scale) are kept.
        Sends nothing, but every rank must call it. The gradient norm is not computed: the result has nan."""
        self._end_accumulation()
        self._deepspeed.set_gradient_accumulation_boundary(False)
        self._deepspeed.step()  # increments the micro-step count
        self._deepspeed.set_gradient_accumulation_boundary(None)  # determined by the micro-step count again
        discard_gradients(self._deepspeed.optimizer, self._stage)
        return StepResult(nan, applied=False)

    def _end_accumulation(self) -> None:
        if not self._backward_done:
            raise RuntimeError("step() and skip_step() must follow the last micro-step of their accumulation")
        self._backward_done = False

    def _step_replicated(self) -> StepResult:
        norm = float(self._grad_norm)  # type: ignore[arg-type] # from the last micro-step
        if isfinite(norm):
            clip_gradients_(self.module.parameters(), norm, self._clipping)
        else:
            discard_gradients(self._deepspeed.optimizer, self._stage)  # Adam skips parameters without gradients
        self._deepspeed.step()
        return StepResult(norm, isfinite(norm))

    def _step_partitioned(self) -> StepResult:
        self._deepspeed.step()
        applied = self._deepspeed.was_step_applied()
        if not applied:
            discard_gradients(self._deepspeed.optimizer, self._stage)
        return StepResult(float(self._deepspeed.get_global_grad_norm()), applied)

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """`module(*args, **kwargs)` in evaluation mode, without gradients, in the run's precision. Collective at stage
        3, where only the module's forward may use weights, which DeepSpeed gathers."""
        training = self.module.training
        self.module.eval()
        try:
            return self._deepspeed(*args, **kwargs)
        finally:
            self.module.train(training)

    @property
    def optimizer_steps(self) -> int:
        """The number of applied steps, as in Adam's bias correction."""
        return int(self._step_counters()[0])

    def tensors(self) -> Iterator[tuple[str, Tensor | RoundRobinShard]]:
        """Yields the state for a checkpoint as full fp32 tensors, in the same order on every rank and mesh.

        Keys are `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` with names as in the module; frozen parameters have
        only a weight, and Muon's no `exp_avg_sq`. Collective, one tensor in memory at a time. A tensor is on the
        engine's device, and may share its memory: copy it if it is needed after the next step. A
        `ShardedEmbeddingEngine` yields only this rank's rows of its embedding, as a `RoundRobinShard`.
        """
        return self._full_state.tensors()

    def load(self, tensors: TensorSource, optimizer_steps: int) -> None:
        """Sets weights, moments and step count from the `tensors` of any stage and mesh. Every rank reads each full
        tensor, one at a time. Collective; CheckpointError for a tensor of another shape. `loss_scale.restore` sets
        fp16's loss scale."""
        for key in (WEIGHT, *MOMENTS):
            self._full_state.set(key, tensors.read)
        for counter in self._step_counters():
            counter.fill_(optimizer_steps)
        if self._captured is not None:
            self._captured.reset()

    def close(self) -> None:
        """Frees the model, which DeepSpeed's gradient hooks reference at stages 1 to 3; makes the engine unusable."""
        self._captured = None
        self._deepspeed.destroy()

    def replicated_weights(self) -> dict[str, Tensor]:
        """The weights that every data rank has in full, as the forward pass uses them; none at stage 3."""
        return {} if self._stage == 3 else self._full_state.replicated_weights()

    def _saved_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters in `tensors` and `load`, by name."""
        return dict(self.module.named_parameters())

    def _step_counters(self) -> list[Tensor]:
        return [state["step"] for state in self._deepspeed.optimizer.state.values()]


class ShardedEmbeddingEngine(Engine):
    """An `Engine` for a `module` with a `ShardedEmbedding`: `prepare_step` fetches the rows of a step, and `step`
    updates them. A step is applied to rows and to the other weights, or to neither. The rows are named `NAME.weight` in
    `weights` and `tensors`, like an embedding's."""

    def __init__(self, module: nn.Module, *, weights: TensorSource, **arguments: Any) -> None:
        self._name, layer = next(pair for pair in module.named_modules() if isinstance(pair[1], ShardedEmbedding))
        self._embedding = cast(ShardedEmbedding, layer)

        def read_weight(name: str) -> Tensor:
            return torch.zeros(GRAD_NORM_PROXY_SIZE) if name == f"{self._name}.grad_norm_proxy" else weights.read(name)

        super().__init__(module, weights=FullTensors(read_weight), **arguments)
        self._embedding.load_rows_(weights.blocks(f"{self._name}.weight"))

    def prepare_step(self, rows: RowPlan | None) -> dict[str, float]:
        """Fetches the rows that the next micro-steps look up. Collective. Returns how many rows it fetched, and how
        many of the requested rows of this rank are stale (not updated by the previous step)."""
        assert rows is not None
        stale = self._embedding.owned.count_stale(rows.owned_O)
        self._embedding.fetch(rows)
        return {"rows_fetched": len(rows.ids_U), "rows_late": stale}

    def step(self, learning_rate: float) -> StepResult:
        loss_scale = self.loss_scale.value
        result = super().step(learning_rate)
        if result.applied:
            clip_factor = min(1.0, self._clipping / (result.grad_norm + 1e-6)) if self._clipping else 1.0
            self._embedding.step(learning_rate, clip_factor / loss_scale)
        else:
            self._embedding.discard()
        return result

    def skip_step(self) -> StepResult:
        self._embedding.discard()
        return super().skip_step()

    def tensors(self) -> Iterator[tuple[str, Tensor | RoundRobinShard]]:
        """Yields the other tensors as in `Engine`, then the embedding's as `late/KEY/NAME`, as some rows' updates are
        pending. Keys: `weight` and the moments as last updated, `touched` (the step of each row's last update), `rates`
        (the learning rate of every step)."""
        yield from super().tensors()
        for key, shard in self._embedding.state().items():
            yield f"late/{key}/{self._name}.weight", shard

    def load(self, tensors: TensorSource, optimizer_steps: int) -> None:
        """As in `Engine`; each rank reads all blocks of the embedding and stores its own rows."""
        super().load(tensors, optimizer_steps)
        self._embedding.restore(MappedTensors(lambda key: (tensors, f"late/{key}/{self._name}.weight")))

    def _saved_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters except `grad_norm_proxy`, which is not part of a checkpoint: a dummy whose gradient has the
        norm of the rows' gradients, so that DeepSpeed's global norm includes them."""
        proxy, parameters = self._embedding.grad_norm_proxy, super()._saved_parameters()
        return {name: parameter for name, parameter in parameters.items() if parameter is not proxy}


def start_engine(module: nn.Module, **arguments: Any) -> Engine:
    """An `Engine` for `module`, or a `ShardedEmbeddingEngine` if its embedding is sharded, with their `arguments`.
    Collective."""
    is_sharded = any(isinstance(layer, ShardedEmbedding) for layer in module.modules())
    return (ShardedEmbeddingEngine if is_sharded else Engine)(module, **arguments)
