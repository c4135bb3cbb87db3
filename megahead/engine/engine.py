"""The engine: backward pass, reduction, clipping and the optimizer step by DeepSpeed at ZeRO 0 to 3."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import RoundRobinShard, RoutedTensors, TensorSource, WholeTensors
from megahead.engine.deepspeed import allocate_, half_dtype, refuse_half_without_zero, start_deepspeed
from megahead.engine.muon import gather_for_muon
from megahead.engine.state import MOMENTS, WEIGHT, FullState, moment_names, open_parameter_states
from megahead.models.parallel import shard_dims
from megahead.objectives.pretraining import fill_
from megahead.optim import Muon, set_learning_rate
from megahead.sharded_embedding.table import NORM_PROXY_SIZE, RowPlan, RowTable


class ForwardTimer:
    """Sums up seconds; on a GPU by events, for which the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """A forward pass, in the block."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((first, last))

    def pop_seconds(self) -> float:
        """Seconds since the last call; on a GPU, the host must have waited for the last forward pass by then (for
        its loss, say), or this raises a RuntimeError."""
        for first, last in self._events:
            self._seconds += first.elapsed_time(last) / 1e3
        taken, self._seconds = self._seconds, 0.0
        self._events.clear()
        return taken


# The global gradient norm and clipping at ZeRO stage 0.
#
# DeepSpeed's own clipping there does not return the norm, and applies a step whose gradients are not finite.


def global_norm(parameters: Iterable[nn.Parameter], tensor_group: Group) -> Tensor:
    """L2 norm of all gradients, each counted once over the tensor ranks; [] on their device. One collective, and the
    host does not wait.

    Parameters that carry `model_parallel = True` are slices whose squares add up; others are copies.
    """
    slices: list[Tensor] = []
    replicated: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            (slices if getattr(parameter, "model_parallel", False) else replicated).append(parameter.grad)
    counted = slices + replicated if tensor_group.rank == 0 else slices
    squared = get_total_norm(counted).square() if counted else torch.zeros(())
    return tensor_group.all_reduce_(squared).sqrt()


def clip_gradients_(parameters: Iterable[nn.Parameter], norm: float, largest: float) -> None:
    """Scales all gradients in place so that their global norm `norm` becomes at most `largest` (0: no limit)."""
    if 0 < largest < norm:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, largest / (norm + 1e-6))


# Discards accumulated gradients, so that the next step begins without any.
#
# DeepSpeed does so only inside a step that it does not apply, and not with all: with the optimizer on the host (stages
# 1 and 2) the fp32 sums of half-precision gradients stay, and every later step adds to sums that are not finite. So
# everything that its optimizers (0.19) hold between two steps is discarded here, on any device.


def discard_gradients(optimizer: Any, stage: int) -> None:
    """Discards all gradients that `optimizer`, a DeepSpeedEngine's at ZeRO `stage`, accumulated since its last step.

    Sends nothing, but every rank must call it. Weights, moments and loss scale stay.
    """
    optimizer.zero_grad()
    if stage == 3:  # as DeepSpeed's step does when it applies nothing, in this order
        optimizer._pre_step()
        optimizer._partition_all_parameters()
        optimizer._overflow_clean_up(optimizer.loss_scale)
    elif hasattr(optimizer, "averaged_gradients"):  # unlike stage 0's, and the one for bf16 at stage 1
        optimizer.micro_step_id = -1  # the next gradients replace what is there, and are not added to it
        for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            sums.update(dict.fromkeys(sums))
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()  # waits for copies to the host; clears their norms and overflow flags


_SEARCH = frozenset({"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"})
"""Attributes of DeepSpeed's `DynamicLossScaler` that change during training."""


class LossScale:
    """The loss scale of DeepSpeed's `optimizer`; 1 in other precisions than fp16."""

    def __init__(self, optimizer: Any) -> None:
        self._scaler = getattr(optimizer, "loss_scaler", None)
        if self.is_dynamic:
            self._scaler.raise_error_at_min_scale = False  # type: ignore[union-attr] # the fault policy decides

    @property
    def value(self) -> float:
        """Its present value."""
        return float(getattr(self._scaler, "cur_scale", 1.0))

    @property
    def is_dynamic(self) -> bool:
        """Whether overflows lower it, so that they are normal."""
        return bool(getattr(self._scaler, "dynamic", False))

    def state(self) -> dict[str, float]:
        """What a restart needs of a dynamic one; empty for others."""
        return {name: getattr(self._scaler, name) for name in _SEARCH} if self.is_dynamic else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """The inverse of `state`; what is not in it stays."""
        if self.is_dynamic:
            for name in _SEARCH & state.keys():
                setattr(self._scaler, name, state[name])


# One optimizer step at a time, at any ZeRO stage; the complete state is read and set by name (`FullState`).
#
# Here every stage keeps promises that DeepSpeed keeps only at some stages: the gradient norm is returned, a step whose
# gradients are not finite on any rank changes nothing, and a new engine into which state is loaded continues bitwise.


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping; inf or nan when the step was not applied."""

    applied: bool
    """False when gradients were not finite (or overflowed in fp16), or the step was skipped: nothing has changed."""


class Engine:
    """`module` under DeepSpeed, driven by micro-steps and steps. Building one is collective.

    `module(batch)` returns a loss scaled as `sum * data_ranks * accumulation / global_targets`, connected
    to every trainable parameter. `optimizer` is an `AdamW` or a `Muon` over the module's trainable parameters, `config`
    the `deepspeed` of a `RunPlan`. At stage 3 `module`'s own parameters are empty outside of its forward: read them
    through `tensors`.

    `weights` has the full (unsharded) tensors that parameters start from, under their names, and is read one at
    a time: `module` may be unallocated (see `assemble`), so that at stage 3 no rank ever holds all of it.
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
        refuse_half_without_zero(config, self._stage)
        if self._stage == 0:
            config = {**config, "gradient_clipping": 0.0}  # ours, see `_step_replicated`
        self._mesh = mesh
        half = half_dtype(config) is not None  # bf16, fp16: set below, since DeepSpeed would round it
        if self._stage < 3:
            allocate_(module) if half else fill_(module, mesh.tensor_group, weights)
        moments = {p: moment_names(group) for group in optimizer.param_groups for p in group["params"]}
        self._deepspeed = start_deepspeed(module, optimizer, config, mesh, device)
        self._reduces_gradients = self._stage < 2 and not hasattr(self._deepspeed.optimizer, "reduce_gradients")
        # else DeepSpeed does in its backward, where it ignores the bucket's size
        self._deepspeed.enable_backward_allreduce = not self._reduces_gradients
        states, dims = open_parameter_states(self._deepspeed, self._stage, mesh.data_group), shard_dims(module)
        saved = self._saved_parameters()
        self._full_state = FullState(saved, moments, states, dims, mesh.tensor_group, self._deepspeed.device)
        if isinstance(optimizer, Muon):
            split: dict[Tensor, int] = {module.get_parameter(name): dim for name, dim in dims.items()}
            gather_for_muon(self._deepspeed, optimizer, self._stage, mesh, split)
        self.loss_scale = LossScale(self._deepspeed.optimizer)
        self._backward_done = False
        self.forward_time = ForwardTimer(device)
        """Of this rank's forward passes."""
        self._grad_norm: Tensor | None = None
        if self._stage == 3 or half:
            self._full_state.set(WEIGHT, lambda key: weights.read(key.removeprefix(f"{WEIGHT}/")))

    @property
    def module(self) -> nn.Module:
        """The module, without DeepSpeed's wrapper."""
        module: nn.Module = self._deepspeed.module
        return module

    def prepare_step(self, rows: RowPlan | None) -> dict[str, float]:
        """To be called before the micro-steps of a step. A `RowEngine` exchanges the embedding's rows that the step
        needs (`rows`) here, and returns what is logged of them; this engine has nothing to do."""
        return {}

    def micro_step(self, batch: Any) -> Tensor:
        """Forward and backward of one micro-batch; the (detached) scalar that the module returned. Collective."""
        with self.forward_time.measure():
            loss: Tensor = self._deepspeed(batch)
        self._deepspeed.backward(loss)
        self._backward_done = self._deepspeed.is_gradient_accumulation_boundary()
        if self._backward_done and self._reduces_gradients:
            self._deepspeed.allreduce_gradients(self._deepspeed.zero_reduce_bucket_size())
        if self._backward_done and self._stage == 0:  # enqueued before the host waits for the losses
            self._grad_norm = global_norm(self.module.parameters(), self._mesh.tensor_group)
        if not self._backward_done:
            self._deepspeed.step()  # only counts the micro-step
        return loss.detach()

    def step(self, learning_rate: float) -> StepResult:
        """Updates the weights after `gradient_accumulation_steps` micro-steps, unless the gradient norm is not finite.

        Collective, and waits for the device, because the decision needs the gradient norm.
        """
        self._end_accumulation()
        set_learning_rate(self._deepspeed.optimizer.param_groups, learning_rate)
        return self._step_replicated() if self._stage == 0 else self._step_sharded()

    def skip_step(self) -> StepResult:
        """Instead of `step`: discards the accumulated gradients; weights and state (also fp16's loss scale) stay.

        Sends nothing, but every rank must call it. The result's gradient norm is nan, since it is not computed.
        """
        self._end_accumulation()
        self._deepspeed.set_gradient_accumulation_boundary(False)
        self._deepspeed.step()  # only counts the micro-step
        self._deepspeed.set_gradient_accumulation_boundary(None)  # by its own count again
        discard_gradients(self._deepspeed.optimizer, self._stage)
        return StepResult(nan, applied=False)

    def _end_accumulation(self) -> None:
        if not self._backward_done:
            raise RuntimeError("step() and skip_step() must follow the last micro-step of their accumulation")
        self._backward_done = False

    def _step_replicated(self) -> StepResult:
        norm = float(self._grad_norm)  # type: ignore[arg-type] # made by the last micro-step
        if isfinite(norm):
            clip_gradients_(self.module.parameters(), norm, self._clipping)
        else:
            discard_gradients(self._deepspeed.optimizer, self._stage)  # Adam skips parameters without gradients
        self._deepspeed.step()
        return StepResult(norm, isfinite(norm))

    def _step_sharded(self) -> StepResult:
        self._deepspeed.step()
        applied = self._deepspeed.was_step_applied()
        if not applied:
            discard_gradients(self._deepspeed.optimizer, self._stage)
        return StepResult(float(self._deepspeed.get_global_grad_norm()), applied)

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """`module(*args, **kwargs)` in evaluation mode, without gradients, in the run's precision.

        Collective at stage 3, where weights are gathered: every rank must call it equally often, and only the module's
        forward may use weights.
        """
        training = self.module.training
        self.module.eval()
        try:
            return self._deepspeed(*args, **kwargs)
        finally:
            self.module.train(training)

    @property
    def optimizer_steps(self) -> int:
        """Steps that were applied, as Adam counts them for its bias correction."""
        return int(self._counters()[0])

    def tensors(self) -> Iterator[tuple[str, Tensor | RoundRobinShard]]:
        """All state that a restart needs, as full fp32 tensors, in the same order on every rank and mesh; of a
        `RowEngine`'s embedding (`engine.embedding: rows`) only this rank's rows, as a `RoundRobinShard`.

        Keys are `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` with names as in the module; frozen parameters have
        only a weight, and Muon's no `exp_avg_sq`. Collective, one tensor in memory at a time. A tensor is on the
        engine's device, and may share its memory: copy it if it is needed after the next step.
        """
        return self._full_state.tensors()

    def load(self, tensors: TensorSource, optimizer_steps: int) -> None:
        """Sets weights, moments and step count; the inverse of `tensors`, from any stage and mesh.

        Every rank reads all of each, one at a time. Collective; CheckpointError for a tensor of another shape.
        fp16's loss scale is set by `loss_scale.restore`.
        """
        for kind in (WEIGHT, *MOMENTS):
            self._full_state.set(kind, tensors.read)
        for counter in self._counters():
            counter.fill_(optimizer_steps)

    def close(self) -> None:
        """Frees the model, which DeepSpeed's gradient hooks hold at stages 1 to 3. The engine is unusable then."""
        self._deepspeed.destroy()

    def replicated_weights(self) -> dict[str, Tensor]:
        """The weights that every data rank holds, as the forward pass uses them; none at stage 3."""
        return {} if self._stage == 3 else self._full_state.replicated_weights()

    def _saved_parameters(self) -> dict[str, nn.Parameter]:
        """Those that `tensors` and `load` know."""
        return dict(self.module.named_parameters())

    def _counters(self) -> list[Tensor]:
        return [state["step"] for state in self._deepspeed.optimizer.state.values()]


class RowEngine(Engine):
    """An `Engine` whose `begin` fetches the rows that a step needs, and whose `step` updates them, or neither rows nor
    other weights.

    `module` contains a `RowTable`. In `weights` and `tensors` its rows are named `NAME.weight`, as an embedding's
    would be.
    """

    def __init__(self, module: nn.Module, *, weights: TensorSource, **arguments: Any) -> None:
        self._name, table = next(pair for pair in module.named_modules() if isinstance(pair[1], RowTable))
        self._table = cast(RowTable, table)

        def body(name: str) -> Tensor:
            return torch.zeros(NORM_PROXY_SIZE) if name == f"{self._name}.norm_proxy" else weights.read(name)

        super().__init__(module, weights=WholeTensors(body), **arguments)
        self._table.fill_(weights.blocks(f"{self._name}.weight"))

    def prepare_step(self, rows: RowPlan | None) -> dict[str, float]:
        """Fetches the rows that the next micro-steps look up; returns how many these are, and how many of those that
        this rank owns and any rank looks up were stale: not updated by the step before. Collective."""
        assert rows is not None
        stale = self._table.owned.count_stale(rows.owned_O)
        self._table.fetch(rows)
        return {"rows_fetched": len(rows.ids_U), "rows_late": stale}

    def step(self, learning_rate: float) -> StepResult:
        loss_scale = self.loss_scale.value
        result = super().step(learning_rate)
        if result.applied:
            clipped = min(1.0, self._clipping / (result.grad_norm + 1e-6)) if self._clipping else 1.0
            self._table.step(learning_rate, clipped / loss_scale)
        else:
            self._table.discard()
        return result

    def skip_step(self) -> StepResult:
        self._table.discard()
        return super().skip_step()

    def tensors(self) -> Iterator[tuple[str, Tensor | RoundRobinShard]]:
        """The body's tensors as in any engine. Then the table's, as `late/KIND/NAME`: `weight` and the moments as last
        updated, `touched` (the step of each row's last update), `rates` (the learning rate of every step)."""
        yield from super().tensors()
        for kind, part in self._table.state().items():
            yield f"late/{kind}/{self._name}.weight", part

    def load(self, tensors: TensorSource, optimizer_steps: int) -> None:
        """As of any engine; rows come block by block, and each rank keeps its own."""
        super().load(tensors, optimizer_steps)
        self._table.restore(RoutedTensors(lambda kind: (tensors, f"late/{kind}/{self._name}.weight")))

    def _saved_parameters(self) -> dict[str, nn.Parameter]:
        """Leaves out the norm proxy (see `RowTable`): it is neither saved nor loaded."""
        there = super()._saved_parameters()
        return {name: parameter for name, parameter in there.items() if parameter is not self._table.norm_proxy}


def start_engine(module: nn.Module, **arguments: Any) -> Engine:
    """An `Engine` for `module`, or a `RowEngine` if its embedding is sharded; `arguments` as of these. Collective."""
    sharded = any(isinstance(layer, RowTable) for layer in module.modules())
    return (RowEngine if sharded else Engine)(module, **arguments)
