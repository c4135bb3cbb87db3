"""Counts of the operators that code dispatches and of the bytes that they move, as on a GPU, but without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megahead.losses import fused_softmax, triton_kernel
from megahead.models import layers
from megahead.objectives import micro_batch

# Prefixes of operations that compute nothing and move nothing
FREE = ("empty", "new_empty", "detach", "alias", "_local_scalar_dense", "lift_fresh", "promote_types", "set_")
FREE += ("_unsafe_view",)
WRITE_ONLY = ("zero_", "fill_", "zeros", "ones", "full", "new_zeros", "zeros_like", "arange", "nll_loss_backward")
# They read only the rows that they look up
ROW_LOOKUPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
# They read the addends, and read and write the rows they add to: in place, except under the counter
ROW_ADDITIONS = ("index_add", "index_add_")


class OperationCounter(TorchDispatchMode):
    """Counts operations, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0
        self.dispatched = 0  # by the host: one for all tensors of a `_foreach`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(FREE):
            in_place = name.startswith("_foreach") and name.endswith("_")  # a kernel for each tensor of two dtypes
            self.dispatched += 1
            self.operations += len(args[0]) if in_place else 1
            self.bytes += _moved_bytes(name, args, args[0] if in_place else result)
        return result


def _moved_bytes(name: str, arguments: Any, result: Any) -> int:
    """Bytes that an operation reads and writes."""
    if name in ROW_ADDITIONS:
        return 3 * _total_bytes(arguments[3])
    read_bytes = 0 if name in WRITE_ONLY else _total_bytes(arguments[1]) if name == "copy_" else _total_bytes(arguments)
    return _total_bytes(result) + (_total_bytes(result) if name in ROW_LOOKUPS else read_bytes)


def _total_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class CountedKernel:
    """Counts launches of the loss's kernel, which reads scores twice and writes score_gradients."""

    def __init__(self, counter: OperationCounter) -> None:
        self.counter = counter

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._count

    def _count(self, scores_nw: Tensor, score_gradients: Tensor | None, *_: object, **options: object) -> None:
        self.counter.operations += 1
        written_bytes = 0 if score_gradients is None else scores_nw.numel() * score_gradients.itemsize
        self.counter.bytes += 2 * scores_nw.nbytes + written_bytes


class _WithoutKernel(triton_kernel.TritonChunkSoftmax):
    def matmul_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        torch.mm(left, right, out=result if result.dtype == left.dtype else None)

    def add_matmul_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        torch.mm(left, right)


@contextmanager
def gpu_code_paths() -> Iterator[None]:
    """Inside, CPU tensors take the code paths of CUDA tensors, without launching the Triton kernel: results are
    meaningless."""
    with (
        mock.patch.object(fused_softmax, "supports_kernel", return_value=True),
        mock.patch.object(triton_kernel, "_softmax_kernel", new=CountedKernel(OperationCounter())),
        mock.patch.object(triton_kernel, "TritonChunkSoftmax", _WithoutKernel),
        mock.patch.object(micro_batch, "CANDIDATE_MULTIPLE", 16),
        mock.patch.object(layers, "layer_norm", new=_layer_norm),
        mock.patch.object(layers, "look_up", F.embedding),
        mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        torch.backends.mkldnn.flags(enabled=False),
    ):
        yield


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)
