"""Starts DeepSpeed, configures its logging, process groups and half precision, and clears its global state."""

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
    """Clears DeepSpeed's references to process groups and modules after the block, in which engines are built.

    Without it DeepSpeed refuses to build an engine on new process groups ("Group ... is not registered").
    """
    try:
        yield
    finally:
        if "deepspeed" in sys.modules:
            with suppress(AttributeError):  # an older DeepSpeed
                importlib.import_module("deepspeed.utils.groups")._release_process_group_references()
            _clear_module_caches()


def _clear_module_caches() -> None:
    """Clears a stack and a method's cache, which keep the last model alive at stage 3."""
    importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    with suppress(AttributeError, KeyError):  # other DeepSpeed versions may not cache it
        method = coordinator.PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(method).nonlocals["func"].cache_clear()


class ModelParallelUnit:
    """Megatron's "mpu": the groups that split the weights (model, tensor) and each batch (data). With it DeepSpeed
    averages gradients over data ranks only. In the gradient norm it sums squares over tensor ranks for parameters with
    `model_parallel = True`, and includes other parameters once."""

    def __init__(self, mesh: Mesh) -> None:
        groups = {"model": mesh.tensor_group, "tensor_model": mesh.tensor_group, "data": mesh.data_group}
        for group_name, group in groups.items():
            for name, value in {"rank": group.rank, "world_size": group.size, "group": group.handle}.items():
                setattr(self, f"get_{group_name}_parallel_{name}", lambda value=value: value)


# Half precision: DeepSpeed rounds parameters when it starts, so their values are set afterwards.


_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def half_dtype(config: dict[str, Any]) -> torch.dtype | None:
    """The dtype of parameters if DeepSpeed's `config` enables half precision; None for fp32 (also with autocast)."""
    enabled = [dtype for key, dtype in _HALF_DTYPES.items() if config.get(key, {}).get("enabled")]
    return enabled[0] if enabled else None


def check_half_precision(config: dict[str, Any], stage: int) -> None:
    """ConfigError for half precision at stage 0, where DeepSpeed's wrappers train incorrectly."""
    for key in _HALF_DTYPES:
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
# DeepSpeed is imported here, when an engine is built, because the import sets its device for the whole process and
# takes half a second.


def load_deepspeed(device: torch.device) -> ModuleType:
    """Imports DeepSpeed for `device`, with its log at WARNING and without a compiler. UserError if it was imported for
    another device type before."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read once, by the import
    deepspeed = importlib.import_module("deepspeed")
    accelerator = deepspeed.accelerator.get_accelerator()
    if (name := accelerator.device_name()) != device.type:
        raise UserError(
            f"`engine.device` must be {name} in this process, where DeepSpeed was started for it, but is {device.type} "
            "instead; start another process (a notebook: restart its kernel), without DS_ACCELERATOR."
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else g++ builds it when ranks connect (CPU)
    _import_deepspeed_muon()
    _use_foreach_norms(device)
    # gradient norms in fp32, as in torch: for fp64 each gradient would be copied at twice the size
    accelerator.is_fp64_supported = lambda: False
    # else each call runs numactl
    accelerator.device_count = cache(partial(type(accelerator).device_count, accelerator))
    deepspeed.utils.nvtx.enable_nvtx = device.type == "cuda"  # CPUs have no profiler for NVTX ranges
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(_keeps_log_record)
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)  # DeepSpeed's calls
    return deepspeed


def _keeps_log_record(record: logging.LogRecord) -> bool:
    """Log filter: drops the warning about our optimizers, which our tests compare with plain torch at each stage."""
    return "untested optimizer" not in record.getMessage()


def _import_deepspeed_muon() -> None:
    """Imports DeepSpeed's Muon, which every step imports for an isinstance check, with compilation disabled. Otherwise
    functions that are never called here load torch's compiler: 1.3 CPU seconds at each start of a rank."""
    compiler = importlib.import_module("deepspeed.runtime.compiler")
    original = compiler.compile
    compiler.compile = lambda *_: lambda function: function  # type: ignore[attr-defined]
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = original  # type: ignore[attr-defined]


# DeepSpeed's bf16 optimizer (stage 1) loops over parameters in Python, with one or two kernels for each. For small
# models on a GPU the host needs longer for that than the device: these do the same arithmetic in one call.


def sum_gradients_after_backward(optimizer: Any) -> None:
    """Makes DeepSpeed's `optimizer` add a micro-batch's gradients to their fp32 sums in one call after the backward
    pass, and free them, unless it does so during the backward pass (`immediate_grad_update`) or has no such sums."""
    if hasattr(optimizer, "update_hp_grads"):
        optimizer.update_hp_grads = partial(_add_gradients, optimizer)


@torch.no_grad()
def _add_gradients(optimizer: Any, clear_lp_grads: bool = False) -> None:
    """Replaces `BF16_Optimizer.update_hp_grads`; gradients are freed even without `clear_lp_grads`, which DeepSpeed
    would do before the next backward pass. All parameters count as having a gradient: otherwise the norm would differ
    between ranks for a parameter whose gradient comes from another rank."""
    mark_gradients(optimizer)
    if optimizer.immediate_grad_update:  # they are added already
        return
    sums, gradients = [], []
    for index, parameters in enumerate(optimizer.bf16_groups):
        for parameter, total in zip(parameters, optimizer.fp32_groups_gradients[index], strict=True):
            if parameter.grad is not None:
                sums.append(total)
                gradients.append(parameter.grad.view(total.shape))
                parameter._hp_grad, parameter.grad = total, None
    if sums:
        torch._foreach_add_(sums, gradients)


def mark_gradients(optimizer: Any) -> None:
    """Marks every parameter of DeepSpeed's bf16 `optimizer` as having a gradient: it reads no fp32 sum of a parameter
    that is not marked."""
    for index, parameters in enumerate(optimizer.bf16_groups):
        optimizer.fp32_groups_has_gradients[index] = [True] * len(parameters)


def _use_foreach_norms(device: torch.device) -> None:
    """Has DeepSpeed's bf16 optimizer compute and clip the L2 norm of many gradients in one call each."""
    bf16 = importlib.import_module("deepspeed.runtime.bf16_optimizer")
    bf16.get_global_norm_of_tensors = partial(_global_norm, device)  # type: ignore[attr-defined]
    bf16.clip_tensors_by_global_norm = _clip  # type: ignore[attr-defined]


def _global_norm(
    device: torch.device, input_tensors: list[torch.Tensor], norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """DeepSpeed's `get_global_norm_of_tensors` for L2 norms over tensor ranks, some of which may have no tensors."""
    if norm_type != 2:
        raise ValueError(f"DeepSpeed asks for a norm of type {norm_type}; only 2 is implemented")
    squared = torch.zeros((), device=device)
    if input_tensors:
        squared = torch.stack(torch._foreach_norm([tensor.detach() for tensor in input_tensors])).square().sum()
    if mpu is not None:
        dist.all_reduce(squared, group=mpu.get_model_parallel_group())
    norm = squared.sqrt()
    return torch.where(norm.isfinite(), norm, -1.0)  # DeepSpeed's value for a norm that is not finite


def _clip(input_tensors: list[torch.Tensor], max_norm: float, global_norm: torch.Tensor, mpu: Any = None) -> None:
    """DeepSpeed's `clip_tensors_by_global_norm` for a norm that is known."""
    factor = max_norm / (global_norm + 1e-6)
    if factor < 1:
        torch._foreach_mul_([tensor.detach() for tensor in input_tensors], factor)


def start_deepspeed(
    module: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], mesh: Mesh, device: torch.device
) -> Any:
    """A `DeepSpeedEngine` for `module`, which it moves to `device` and, at stage 3, partitions. Collective. Initializes
    torch.distributed with this process alone if it is not initialized."""
    deepspeed = load_deepspeed(device)
    _require_machine_support(config)
    deepspeed_errors = deepspeed.DeepSpeedConfigError, deepspeed.runtime.zero.utils.ZeRORuntimeException
    if device.index is not None:  # DeepSpeed reads its device from LOCAL_RANK, which srun and python do not set
        os.environ["LOCAL_RANK"] = str(device.index)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mpu = ModelParallelUnit(mesh) if mesh.tensor_group.size > 1 else None
    try:
        with redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory reports; warnings go to stderr
            deepspeed.init_distributed(dist.get_backend())
            timeout = timedelta(seconds=mesh.world_group.timeout_seconds)  # torch's default is half an hour with gloo
            deepspeed.comm.comm.cdb.new_group = partial(dist.new_group, timeout=timeout)
            if config.get("zero_optimization", {}).get("stage") == 3:
                proxy, data = _AllocatingModule(module, config), mesh.data_group.handle
                deepspeed.zero.Init(module=proxy, data_parallel_group=data, config_dict_or_path=config, mpu=mpu)
            # with grad enabled, its flat copies of parameters would keep their AccumulateGrad nodes, which add
            # gradients on the stream of their creation, but CUDA graphs are captured on another stream
            with torch.no_grad():
                engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mpu=mpu)
    except (ValueError, TypeError, AssertionError, *deepspeed_errors) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(f"`engine.deepspeed` must be what DeepSpeed accepts, but it reports: {reason}.") from error
    return engine


def _require_machine_support(config: dict[str, Any]) -> None:
    """ConfigError for fp16 on a device without it, or for offloading to NVMe if DeepSpeed cannot build its async_io
    operator."""
    if half_dtype(config) == torch.float16:
        supported = importlib.import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported()
        if not supported:
            raise ConfigError("engine.precision", "be fp32 or bf16 on a device without arithmetic in fp16", got="fp16")
    for name in ("offload_optimizer", "offload_param"):
        if (config.get("zero_optimization", {}).get(name) or {}).get("device") == "nvme":
            operator = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
            if not operator.is_compatible(verbose=False):
                rule = "be cpu on a machine where DeepSpeed's async_io cannot be built"
                hint = "or install libaio's headers (libaio-dev, libaio-devel)"
                raise ConfigError(f"engine.deepspeed.zero_optimization.{name}.device", rule, got="nvme", hint=hint)


class _AllocatingModule(nn.Module):
    """A proxy whose `parameters` allocates each parameter of `module` just before DeepSpeed partitions it. So at most
    one parameter is in memory in full, in the dtype of the forward pass."""

    def __init__(self, module: nn.Module, config: dict[str, Any]) -> None:
        super().__init__()
        self._dtype = half_dtype(config) or torch.float32
        self._module_parameters = module.parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self._module_parameters():
            # cloned: `contiguous` keeps the stride 0 of a number expanded to [1]
            parameter.data = parameter.data.to(self._dtype).clone(memory_format=torch.contiguous_format)
            yield parameter
