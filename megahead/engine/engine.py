"""One optimizer step at a time, at any ZeRO stage; the complete state is read and set by name (`full_state`).

Here every stage keeps promises that DeepSpeed keeps only at some stages: the gradient norm is returned, a step whose
gradients are not finite on any rank changes nothing, and a new engine into which state is loaded continues bitwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from megahead.distributed import Mesh, RowShard, Tensors
from megahead.engine.forward_time import ForwardTime
from megahead.engine.full_state import FullState
from megahead.engine.gradients import discard_gradients
from megahead.engine.half import allocate_, half_format, refuse_half_without_zero
from megahead.engine.loss_scale import LossScale
from megahead.engine.norm import clip_, global_norm
from megahead.engine.start import start_deepspeed
from megahead.engine.state import MOMENTS, WEIGHT, moments_of, open_parameter_states
from megahead.engine.whole_matrices import gather_for_muon
from megahead.optim import Muon, set_learning_rate
from megahead.parallel import fill_, shard_dims
from megahead.table import RowPlan


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

    `weights` has the full (unsharded) tensors that parameters start from, under their names, and is asked for one at
    a time: `module` may be hollow (see `parallel.assemble`), so that at stage 3 no rank ever holds all of it.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        mesh: Mesh,
        device: torch.device,
        weights: Tensors,
    ) -> None:
        self._stage = int(config.get("zero_optimization", {}).get("stage", 0))
        self._clipping = float(config.get("gradient_clipping", 0.0))
        refuse_half_without_zero(config, self._stage)
        if self._stage == 0:
            config = {**config, "gradient_clipping": 0.0}  # ours, see `_step_replicated`
        self._mesh = mesh
        half = half_format(config) is not None  # bf16, fp16: set below, since DeepSpeed would round it
        if self._stage < 3:
            allocate_(module) if half else fill_(module, mesh.tensor_group, weights)
        moments = {p: moments_of(group) for group in optimizer.param_groups for p in group["params"]}
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
        self.forward_time = ForwardTime(device)
        """Of this rank's forward passes."""
        self._grad_norm: Tensor | None = None
        if self._stage == 3 or half:
            self._full_state.set(WEIGHT, lambda key: weights.read(key.removeprefix(f"{WEIGHT}/")))

    @property
    def module(self) -> nn.Module:
        """The module, without DeepSpeed's wrapper."""
        module: nn.Module = self._deepspeed.module
        return module

    def begin(self, rows: RowPlan | None) -> int:
        """To be called before the micro-steps of a step. A `RowEngine` exchanges the embedding's rows that the step
        needs (`rows`) here, and returns how many were stale; this engine has nothing to do."""
        return 0

    def micro_step(self, batch: Any) -> Tensor:
        """Forward and backward of one micro-batch; the (detached) scalar that the module returned. Collective."""
        with self.forward_time.measured():
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
        self._discard_gradients()
        return StepResult(nan, applied=False)

    def _end_accumulation(self) -> None:
        if not self._backward_done:
            raise RuntimeError("step() and skip_step() must follow the last micro-step of their accumulation")
        self._backward_done = False

    def _step_replicated(self) -> StepResult:
        norm = float(self._grad_norm)  # type: ignore[arg-type] # made by the last micro-step
        if isfinite(norm):
            clip_(self.module.parameters(), norm, self._clipping)
        else:
            self._discard_gradients()  # Adam skips parameters without gradients
        self._deepspeed.step()
        return StepResult(norm, isfinite(norm))

    def _step_sharded(self) -> StepResult:
        self._deepspeed.step()
        applied = self._deepspeed.was_step_applied()
        if not applied:
            self._discard_gradients()
        return StepResult(float(self._deepspeed.get_global_grad_norm()), applied)

    def _discard_gradients(self) -> None:
        discard_gradients(self._deepspeed.optimizer, self._stage)

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

    def tensors(self) -> Iterator[tuple[str, Tensor | RowShard]]:
        """All state that a restart needs, as full fp32 tensors, in the same order on every rank and mesh; of a
        `RowEngine`'s embedding (`engine.embedding: rows`) only this rank's rows, as a `RowShard`.

        Keys are `weight/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` with names as in the module; frozen parameters have
        only a weight, and Muon's no `exp_avg_sq`. Collective, one tensor in memory at a time. A tensor is on the
        engine's device, and may share its memory: copy it if it is needed after the next step.
        """
        return self._full_state.tensors()

    def load(self, tensors: Tensors, optimizer_steps: int) -> None:
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

    def replicated(self) -> dict[str, Tensor]:
        """The weights that every data rank holds, as the forward pass uses them; none at stage 3."""
        return {} if self._stage == 3 else self._full_state.replicated()

    def _saved_parameters(self) -> dict[str, nn.Parameter]:
        """Those that `tensors` and `load` know."""
        return dict(self.module.named_parameters())

    def _counters(self) -> list[Tensor]:
        return [state["step"] for state in self._deepspeed.optimizer.state.values()]
