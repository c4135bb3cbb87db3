"""Rules of CUDA that CPUs do not have, on a CPU: autocast keeps more operators in fp32, deterministic algorithms refuse
some."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

FP32_OPERATORS = ("rms_norm", "layer_norm", "exp", "log", "rsqrt", "reciprocal", "logsumexp", "cosine_similarity")
"""In fp32 under autocast on CUDA (AT_FORALL_FP32 in torch's autocast_mode.h), and not on CPUs."""


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Autocast to bf16 on a CPU, by CUDA's list of operators in fp32."""
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it replaces a CPU's rule
            for name in FP32_OPERATORS:
                in_fp32 = _in_fp32(getattr(torch.ops.aten, name).default)
                library.impl(name, in_fp32, "AutocastCPU", allow_override=True)
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        library._destroy()


def _in_fp32(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to_fp32(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    def in_fp32(*arguments: Any, **keywords: Any) -> Tensor:
        autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operator(*tree_map_only(Tensor, to_fp32, arguments), **tree_map_only(Tensor, to_fp32, keywords))

    return in_fp32


_REFUSED = {"cumsum", "cumsum_", "histc", "median", "put_"}


class DeterministicCuda(TorchDispatchMode):
    """Refuses of floats what `torch.use_deterministic_algorithms` refuses on CUDA; its documentation has the list, here
    without layers that no model has."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name in _REFUSED and torch.are_deterministic_algorithms_enabled():
            has_floats = any(x.is_floating_point() for x in tree_leaves(result) if isinstance(x, Tensor))
            assert not has_floats, f"{name} has no deterministic form on CUDA"
        return result
