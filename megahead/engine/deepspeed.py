"""Starts and stops DeepSpeed, and adapts it: logging, groups, half precision."""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megahead.distributed.group import Mesh
from megahead.errors import ConfigError, UserError


@contextmanager
def deepspeed_session() -> Iterator[None]:
    """Inside, engines are built and closed; afterwards DeepSpeed remembers no groups of ranks and no modules.

    Without it an engine built on other connections than the last one is refused ("Group ... is not registered").
    """
    try:
        yield
    finally:
        if "deepspeed" in sys.modules:
            with suppress(AttributeError):  # an older DeepSpeed
                importlib.import_module("deepspeed.utils.groups")._release_process_group_references()
            _forget_modules()


def _forget_modules() -> None:
    """Clears a stack and a method's cache, which keep the last model alive at stage 3."""
    importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    with suppress(AttributeError, KeyError):  # another DeepSpeed's method may have none
        method = coordinator.PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(method).nonlocals["func"].cache_clear()


class ModelParallelUnit:
    """Megatron's "mpu": which ranks split the weights (model, tensor) and which split each batch (data).

    With it DeepSpeed averages gradients over data ranks only. For the gradient norm it sums squares over tensor ranks
    for parameters that carry `model_parallel = True`; all others count once.
    """

    def __init__(self, mesh: Mesh) -> None:
        groups = {"model": mesh.tensor_group, "tensor_model": mesh.tensor_group, "data": mesh.data_group}
        for kind, group in groups.items():
            for name, value in {"rank": group.rank, "world_size": group.size, "group": group.handle}.items():
                setattr(self, f"get_{kind}_parallel_{name}", lambda value=value: value)


# Half precision: DeepSpeed rounds parameters when it starts, so they are given their values only afterwards.


_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def half_dtype(config: dict[str, Any]) -> torch.dtype | None:
    """The half-precision type that DeepSpeed's `config` gives parameters; None for fp32 (also with autocast)."""
    enabled = [dtype for key, dtype in _FORMATS.items() if config.get(key, {}).get("enabled")]
    return enabled[0] if enabled else None


def refuse_half_without_zero(config: dict[str, Any], stage: int) -> None:
    """ConfigError for half precision at stage 0, where DeepSpeed's wrappers train wrongly."""
    for key in _FORMATS:
        if stage == 0 and config.get(key, {}).get("enabled"):
            raise ConfigError(
                "engine.deepspeed.zero_optimization.stage",
                f"be at least 1 with {key}.enabled (at stage 0 DeepSpeed takes a step too many)",
                got=0,
                hint="use stage 1, or torch_autocast",
            )


def allocate_(module: nn.Module) -> None:
    """Gives unallocated parameters memory, filled with zeros."""
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter, memory_format=torch.contiguous_format)


# Starts DeepSpeed without a compiler, without a rendezvous if there is one rank, and without its log lines.
#
# DeepSpeed is imported here and only when an engine is built, because the import fixes its device for the whole
# process and costs half a second.


def load_deepspeed(device: torch.device) -> ModuleType:
    """DeepSpeed, imported for `device`; it prints warnings only, and does not use a compiler.

    UserError if it was imported for another kind of device before.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read once, by the import
    deepspeed = importlib.import_module("deepspeed")
    accelerator = deepspeed.accelerator.get_accelerator()
    if (kind := accelerator.device_name()) != device.type:
        raise UserError(
            f"`engine.device` must be {kind} in this process, where DeepSpeed was started for it, but is {device.type} "
            "instead; start another process (a notebook: restart its kernel), without DS_ACCELERATOR."
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else built by g++ when ranks connect (CPU)
    _load_its_muon()
    # norms of gradients in fp32, as torch has them: in fp64 each is a copy twice the size
    accelerator.is_fp64_supported = lambda: False
    # else numactl is called each time
    accelerator.device_count = cache(partial(type(accelerator).device_count, accelerator))
    deepspeed.utils.nvtx.enable_nvtx = device.type == "cuda"  # marks that CPUs have no profiler for
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)  # its calls, not ours
    return deepspeed


def _is_news(record: logging.LogRecord) -> bool:
    """Not that it does not know our optimizers: tests hold them against plain torch at each stage."""
    return "untested optimizer" not in record.getMessage()


def _load_its_muon() -> None:
    """Imports DeepSpeed's Muon, whose class it compares optimizers with in every step, before it does so itself: then
    functions that nobody calls here would load torch's compiler. Measured: 1.3 CPU seconds at each start of a rank."""
    compiler = importlib.import_module("deepspeed.runtime.compiler")
    compile_its, compiler.compile = compiler.compile, lambda *_: lambda function: function  # type: ignore[attr-defined]
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_its  # type: ignore[attr-defined]


def start_deepspeed(
    module: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], mesh: Mesh, device: torch.device
) -> Any:
    """A `DeepSpeedEngine` around `module`, which it moves to `device` and, at stage 3, partitions. Collective.

    Without a process group, one of this process alone is made.
    """
    deepspeed = load_deepspeed(device)
    _refuse_nvme_without_async_io(config)
    own_errors = deepspeed.DeepSpeedConfigError, deepspeed.runtime.zero.utils.ZeRORuntimeException
    if device.index is not None:  # DeepSpeed takes its device from LOCAL_RANK, which srun and python do not set
        os.environ["LOCAL_RANK"] = str(device.index)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mpu = ModelParallelUnit(mesh) if mesh.tensor_group.size > 1 else None
    try:
        with redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory reports; warnings still pass
            deepspeed.init_distributed(dist.get_backend())
            limit = timedelta(seconds=mesh.world_group.timeout_seconds)  # torch's default is half an hour with gloo
            deepspeed.comm.comm.cdb.new_group = partial(dist.new_group, timeout=limit)
            if config.get("zero_optimization", {}).get("stage") == 3:
                parts, data = _OneByOne(module, config), mesh.data_group.handle
                deepspeed.zero.Init(module=parts, data_parallel_group=data, config_dict_or_path=config, mpu=mpu)
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mpu=mpu)
    except (ValueError, TypeError, AssertionError, *own_errors) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(f"`engine.deepspeed` must be what DeepSpeed accepts, but it reports: {reason}.") from error
    return engine


def _refuse_nvme_without_async_io(config: dict[str, Any]) -> None:
    """ConfigError for offloading to NVMe where DeepSpeed cannot build its operator for that."""
    for name in ("offload_optimizer", "offload_param"):
        if (config.get("zero_optimization", {}).get(name) or {}).get("device") == "nvme":
            operator = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
            if not operator.is_compatible(verbose=False):
                rule = "be cpu on a machine where DeepSpeed's async_io cannot be built"
                hint = "or install libaio's headers (libaio-dev, libaio-devel)"
                raise ConfigError(f"engine.deepspeed.zero_optimization.{name}.device", rule, got="nvme", hint=hint)


class _OneByOne(nn.Module):
    """Gives a module's parameters to DeepSpeed one at a time, in the format of the forward pass, to be partitioned.

    A parameter without memory gets it only when it is yielded, so that at most one is ever held in full.
    """

    def __init__(self, module: nn.Module, config: dict[str, Any]) -> None:
        super().__init__()
        self._dtype = half_dtype(config) or torch.float32
        self._of_module = module.parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self._of_module():
            # a copy, because of one number expanded to [1] `contiguous` keeps the stride 0
            parameter.data = parameter.data.to(self._dtype).clone(memory_format=torch.contiguous_format)
            yield parameter
