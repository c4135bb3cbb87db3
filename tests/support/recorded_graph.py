"""A CPU's stand-in for a CUDA graph: the operators of a function, replayed on the same memory without its Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megahead.engine.graphs import MicroStep

HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
"""Operators whose result the host needs before it goes on: no graph can have them."""


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """Runs and records operators, and keeps what memory held that was there before and is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Any]] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in HOST_READS, f"{func} makes the host wait for the device"
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            if storage_of(tensor) not in self._known:
                self.before.append((tensor, tensor.untyped_storage().clone()))
                self._known.add(storage_of(tensor))
        inputs = {storage_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        made = {storage_of(x) for x in tree_leaves(result) if isinstance(x, Tensor)}
        self._known |= made - inputs
        self.calls.append((func, args, kwargs, result))
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    names = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return [x for name in names for x in tree_leaves(values.get(name)) if isinstance(x, Tensor)]


class RecordedGraphs:
    """A `Capture` that counts: like CUDA's it has no effect itself, and a replay none on what Python holds."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, micro_step: MicroStep) -> MicroStep:
        self.captures += 1
        with _Recorder() as recorder:
            loss = micro_step()
        for tensor, content in recorder.before:
            tensor.untyped_storage().copy_(content)

        @torch.no_grad()
        def replay() -> Tensor:
            self.replays += 1
            for func, args, kwargs, recorded in recorder.calls:
                result = func(*args, **kwargs)
                for old, new in zip(tree_leaves(recorded), tree_leaves(result), strict=True):
                    if isinstance(old, Tensor) and storage_of(old) != storage_of(new):
                        old.copy_(new)
            return loss.clone()

        return replay
