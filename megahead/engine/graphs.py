"""The captured micro-step: forward, loss and backward of a micro-batch as one CUDA graph, launched by one call.

A graph is for one shape of micro-batches. It reads static inputs, into which each micro-batch is copied, and adds to
gradients at fixed addresses. What DeepSpeed does in Python is not part of it: the engine counts micro-steps, reduces
and updates as it does without graphs. On a CPU nothing is captured, and a replay runs the micro-step on the static
inputs: all else is the same, so that tests without a GPU cover it.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megahead.config.plan import RunPlan
from megahead.engine.deepspeed import mark_gradients
from megahead.objectives.micro_batch import MicroBatch

WARM_UP = 2
"""Micro-batches of a shape that run uncaptured before it is captured: they compile kernels and blocks."""

MAX_GRAPHS = 8
"""Micro-batches of further shapes run uncaptured. Candidates, documents and masked tokens are padded to multiples, so
that most runs have one to four shapes."""


def describe_graphs(plan: RunPlan) -> list[tuple[str, str]]:
    """(name, text) of the line about graphs at a run's start, if its config asks for them on its device."""
    if not plan.wants_graphs():
        return []
    if reason := plan.graphs_unsupported_reason():
        return [("graphs", f"no, {reason}")]
    on_gpu = f"one for each shape of a micro-batch, {MAX_GRAPHS} at most"
    return [("graphs", on_gpu if plan.device == "cuda" else "static inputs alone, since a CPU has no graphs")]


class GradientSums:
    """Gradients at fixed addresses, to which all micro-steps of a step add, captured or not. With DeepSpeed's bf16
    `optimizer` they are its fp32 sums. With others (at ZeRO 0) they are `grad` of the `parameters`: their memory is
    kept over steps, although DeepSpeed sets `grad` to None in between."""

    def __init__(self, optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
        self._optimizer, self._in_optimizer = optimizer, hasattr(optimizer, "update_hp_grads")
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sums = [] if self._in_optimizer else [torch.zeros_like(parameter) for parameter in self._parameters]

    def prepare(self) -> None:
        """Must be called before each micro-step: sets `grad` to zeros at the first one of a step."""
        if not self._in_optimizer and self._parameters[0].grad is not self._sums[0]:
            torch._foreach_zero_(self._sums)
            for parameter, total in zip(self._parameters, self._sums, strict=True):
                parameter.grad = total

    def end_replay(self) -> None:
        """Marks the gradients as present for DeepSpeed, as Python code of an uncaptured micro-step does; must be called
        after each replay."""
        if self._in_optimizer:
            mark_gradients(self._optimizer)

    def discard_capture(self) -> None:
        """Clears the `grad` that a failed capture left under DeepSpeed's bf16 optimizer: only an uncaptured micro-step
        frees it, and replays do not."""
        if self._in_optimizer:
            for parameter in self._parameters:
                parameter.grad = None


MicroStep = Callable[[], Tensor]
"""Forward and backward on static inputs; returns the detached loss."""

Capture = Callable[[MicroStep], MicroStep]
"""Captures a micro-step without running it; the result replays it."""


def without_capture(micro_step: MicroStep) -> MicroStep:
    """The `Capture` of CPUs, which have no graphs: a replay runs the micro-step."""
    return micro_step


class CudaCapture:
    """The `Capture` of GPUs. All its graphs share one pool of memory, since only one of them runs at a time. Once they
    are discarded, captures need another `CudaCapture`: torch refuses a pool that has no graphs left."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, micro_step: MicroStep) -> MicroStep:
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # frees earlier autograd graphs, whose AccumulateGrad nodes add gradients on another stream
        # thread_local: the loader's thread pins memory meanwhile; stream: after a failed capture torch does not leave
        # its own
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            loss = micro_step()

        def replay() -> Tensor:
            graph.replay()
            return loss.clone()  # the next replay overwrites it

        return replay


def build_capture(device: torch.device) -> Capture:
    """The `Capture` for `device`."""
    return CudaCapture() if device.type == "cuda" else without_capture


class CapturedMicroStep:
    """Runs micro-batches: those of a captured shape by a replay, others by `run`, which returns the detached loss.

    Needs the memory of activations twice where micro-batches of other shapes, or evaluations, run between replays.
    """

    def __init__(
        self, run: Callable[[MicroBatch], Tensor], sums: GradientSums, build_capture: Callable[[], Capture]
    ) -> None:
        self.unsupported_reason = ""
        self._run, self._sums, self._build_capture = run, sums, build_capture
        self._capture = build_capture()
        self._graphs: dict[Hashable, tuple[MicroBatch, MicroStep]] = {}
        self._counts: Counter[Hashable] = Counter()

    def __call__(self, micro: MicroBatch) -> Tensor:
        """The loss, after the gradients have been added to their sums."""
        self._sums.prepare()
        graph = self._find_graph(micro)
        if graph is None:
            return self._run(micro)
        static, replay = graph
        assert static.buffer is not None
        assert micro.buffer is not None
        static.buffer.copy_(micro.buffer, non_blocking=True)  # all tensors of a micro-batch are views of it
        loss = replay()
        self._sums.end_replay()
        return loss

    def reset(self) -> None:
        """Discards all graphs, since weights may have moved. Shapes are captured again."""
        self._graphs.clear()
        self._counts.clear()
        self._capture = self._build_capture()

    def _find_graph(self, micro: MicroBatch) -> tuple[MicroBatch, MicroStep] | None:
        """The static inputs and the replay for the shape of `micro`, captured after its warm-up; None: run it."""
        shapes = micro.shapes
        if shapes is not None and shapes not in self._graphs and not self.unsupported_reason:
            self._counts[shapes] += 1
            if self._counts[shapes] > WARM_UP:
                self._capture_shapes(micro)
        return self._graphs.get(shapes)

    def _capture_shapes(self, micro: MicroBatch) -> None:
        """Adds the graph for the shape of `micro`; where that fails, or there are too many, warns and captures none
        from then on."""
        if len(self._graphs) == MAX_GRAPHS:
            self._stop_capturing(f"they have more than {MAX_GRAPHS} shapes")
            return
        assert micro.buffer is not None
        static = micro.with_buffer(micro.buffer.clone())
        try:
            self._graphs[micro.shapes] = static, self._capture(lambda: self._run(static))
        except RuntimeError as error:
            self._sums.discard_capture()
            cause = error.__context__ or error  # torch's `graph` raises again when it ends a failed capture
            self._stop_capturing(str(cause).partition("\n")[0])

    def _stop_capturing(self, reason: str) -> None:
        self.unsupported_reason = reason
        warnings.warn(f"further micro-batches are not captured: {reason}", stacklevel=2)
