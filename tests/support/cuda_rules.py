"""Rules of CUDA that CPUs do not have, on a machine without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)


_CUDA_TYPE, _META_TYPE = 1, 14  # torch's numbers of device types


@contextmanager
def fake_cuda(*, autocast: bool) -> Iterator[FakeTensorMode]:
    """Tensors in the block have shapes, dtypes and devices, but no numbers: torch refuses operators on two devices, and
    what the host would read of a device. `autocast`: to bf16 by CUDA's rules, which keep more operators in fp32 than a
    CPU's. There are no backward passes. Changes this process for good: call it in a forked one."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    guards = (ctypes.c_void_p * (_META_TYPE + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA_TYPE] = guards[_CUDA_TYPE] or guards[_META_TYPE]  # torch for CPUs has none for CUDA
    torch._C._ensureCUDADeviceGuardSet()
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", autocast)
    with FakeTensorMode() as mode:
        yield mode
    torch.set_autocast_enabled("cuda", False)


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


class CudaRounding(TorchDispatchMode):
    """Rounds both factors of products of elements to their common dtype, as CUDA does; CPUs keep those without dims."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mul:
            dtype = torch.result_type(*args)
            args = [x.to(dtype) if isinstance(x, Tensor) else x for x in args]
        return func(*args, **(kwargs or {}))
