"""Reads and sets DeepSpeed's weights and optimizer state as full named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.optim import MOMENTUM


class FrozenWeights:
    """fp32 values of frozen parameters for checkpoints, in host memory, partitioned over `data_group`."""

    def __init__(self, data_group: Group, device: torch.device) -> None:
        self._data_group = data_group
        self._device = device
        self._shards: dict[nn.Parameter, tuple[Tensor, torch.Size]] = {}

    def store(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Stores this rank's slice of `full`, the full value of `parameter`. Sends nothing."""
        flat = functional.pad(full.detach().flatten().float(), (0, -full.numel() % self._data_group.size))
        self._shards[parameter] = self._data_group.shard(flat, 0).cpu(), full.shape

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """The full stored value, on the device; None if none was stored. Collective."""
        if parameter not in self._shards:
            return None
        shard, shape = self._shards[parameter]
        return self._data_group.unshard(shard.to(self._device), 0)[: shape.numel()].view(shape)


# Weights and Adam's state as full (unpartitioned) tensors, at any ZeRO stage.
#
# DeepSpeed has up to three tensors per parameter: the model weight (in the dtype of the forward pass), an fp32 master
# weight, and the optimizer's state, the last two as slices of a flat buffer per rank. The states that
# `open_parameter_states` returns read and write one parameter, in full and in fp32, independently of this layout.


WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


def open_parameter_states(engine: Any, stage: int, data_group: Group) -> ReplicatedStates | PartitionedStates:
    """The states of a `DeepSpeedEngine`'s parameters, partitioned over `data_group`; Adam's moments start as zeros.

    `get` and `set` access one parameter's WEIGHT or one of its MOMENTS (`state_key`), and are collective. Must be
    called before the first step: at stages 1 and 2 DeepSpeed itself links states to parameters only once, after the
    step of the first parameter group, when the other groups have no state yet. Does not raise peak memory.
    """
    optimizer = engine.optimizer
    if stage == 0:
        _init_moments(optimizer, _grouped_parameters(optimizer))
        return ReplicatedStates(optimizer)
    frozen = FrozenWeights(data_group, engine.device)
    if stage == 3:
        groups = (optimizer.param_groups[index] for index in optimizer.sub_group_to_group_id.values())
        _init_moments(optimizer.optimizer, zip(groups, optimizer.fp32_partitioned_groups_flat, strict=True))
        return FullyPartitionedStates(frozen)
    _init_moments(optimizer.optimizer, _grouped_parameters(optimizer))
    if getattr(optimizer, "round_robin_gradients", False):
        _link_round_robin(optimizer)
    optimizer._lazy_init_hp_params_optimizer_state()
    return PartitionedStates(frozen)


def moment_names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the optimizer's moments for a parameter group."""
    return (MOMENTUM,) if group.get("is_muon") else MOMENTS


GroupedParameter = tuple[Mapping[str, Any], Tensor]
"""(parameter group, parameter)"""


def _grouped_parameters(optimizer: Any) -> Iterator[GroupedParameter]:
    return ((group, tensor) for group in optimizer.param_groups for tensor in group["params"])


def _init_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[GroupedParameter]) -> None:
    """Creates the state that the optimizer itself would create in its first step, with the same names."""
    for group, tensor in parameters:
        on_device = group.get("capturable") or group.get("fused")
        optimizer.state[tensor] = {
            "step": torch.zeros((), device=tensor.device if on_device else "cpu"),
            **{name: torch.zeros_like(tensor, requires_grad=False) for name in moment_names(group)},
        }


def _link_round_robin(optimizer: Any) -> None:
    """Corrects DeepSpeed's accessors for `round_robin_gradients`, where slices are in another order than they assume:
    on two or more ranks they would read and write other parameters' values."""
    from deepspeed.utils import link_hp_params

    for index, parameters in enumerate(optimizer.bit16_groups):
        ordered, offsets = optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index]
        offset_by_id = {id(parameter): offset for parameter, offset in zip(ordered, offsets, strict=True)}
        ranks, size = optimizer.real_dp_process_group[index], optimizer.partition_size[index]
        link_hp_params(
            lp_param_list=parameters,
            flat_hp_partition=optimizer.single_partition_of_fp32_groups[index],
            gradient_dict=optimizer.averaged_gradients,
            offload_gradient_dict=optimizer.offload_gradient_dict,
            use_offload=optimizer.cpu_offload,
            param_group_index=index,
            partition_start=dist.get_rank(ranks) * size,
            partition_size=size,
            dp_group=ranks,
            param_offsets=[offset_by_id[id(parameter)] for parameter in parameters],
        )


class ReplicatedStates:
    """Stage 0: every rank has the full state; nothing is sent."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._states = optimizer.state

    def get(self, parameter: nn.Parameter, state_key: str) -> Tensor:
        full: Tensor = parameter.detach() if state_key == WEIGHT else self._states[parameter][state_key]
        return full

    def set(self, parameter: nn.Parameter, state_key: str, value: Tensor) -> None:
        self.get(parameter, state_key).copy_(value)


class PartitionedStates:
    """Stages 1 and 2: master weights and moments are partitioned, the model weight is full on every rank. DeepSpeed's
    accessors read a parameter by an all-reduce of the full tensor, and write without sending. They return None for
    frozen parameters, which have no master weight, and never write the model weight."""

    def __init__(self, frozen: FrozenWeights) -> None:
        self._frozen, self._deepspeed = frozen, import_module("deepspeed")

    def get(self, parameter: nn.Parameter, state_key: str) -> Tensor:
        if not parameter.requires_grad:
            stored = self._frozen.read(parameter)
            return self._get_model_weight(parameter) if stored is None else stored
        utils = self._deepspeed.utils
        if state_key == WEIGHT:
            return cast(Tensor, utils.safe_get_full_fp32_param(parameter))
        return cast(Tensor, utils.safe_get_full_optimizer_state(parameter, state_key))

    def set(self, parameter: nn.Parameter, state_key: str, value: Tensor) -> None:
        if parameter.requires_grad:
            self._set_partition(parameter, state_key, value)
        elif parameter.dtype != torch.float32:
            self._frozen.store(parameter, value)
        if state_key == WEIGHT:
            with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):  # does nothing before stage 3
                parameter.data.copy_(value)

    def _get_model_weight(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def _set_partition(self, parameter: nn.Parameter, state_key: str, value: Tensor) -> None:
        utils = self._deepspeed.utils
        if state_key == WEIGHT:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, state_key)


class FullyPartitionedStates(PartitionedStates):
    """Stage 3: the model weight is partitioned too; reading gathers it, setting broadcasts it from the first rank."""

    def _get_model_weight(self, parameter: nn.Parameter) -> Tensor:
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _set_partition(self, parameter: nn.Parameter, state_key: str, value: Tensor) -> None:
        """Sets this rank's slice; DeepSpeed's accessors of full tensors fail for slices that end beyond the tensor."""
        length = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        start = length * parameter._z3_optimizer._get_param_partition_rank(parameter)  # type: ignore[attr-defined]
        part = value.flatten()[start : start + length]
        part = functional.pad(part, (0, length - len(part)))
        utils = self._deepspeed.utils
        if state_key == WEIGHT:
            utils.safe_set_local_fp32_param(parameter, part)
        else:
            utils.safe_set_local_optimizer_state(parameter, part, state_key)


class FullState:
    """Weights and moments as full tensors by name. All methods but `replicated_weights` are collective."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        moments: Mapping[Tensor, Sequence[str]],
        states: ReplicatedStates | PartitionedStates,
        shard_dims: Mapping[str, int],
        tensor_group: Group,
        device: torch.device,
    ) -> None:
        """`moments`: each trained parameter's moments; `shard_dims`: the dim along which a parameter is sharded over
        `tensor_group`."""
        self._parameters, self._moments, self._states = parameters, moments, states
        self._shard_dims, self._tensor_group, self._device = shard_dims, tensor_group, device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor as `KEY/NAME`, in fp32; one is in memory at a time."""
        for state_key in (WEIGHT, *MOMENTS):
            for name, parameter in self._parameters_with(state_key):
                part, dim = self._states.get(parameter, state_key), self._shard_dims.get(name)
                full = part if dim is None else self._tensor_group.unshard(part, dim)
                yield f"{state_key}/{name}", full.detach().float()

    def set(self, state_key: str, read_tensor: Callable[[str], Tensor]) -> None:
        """Sets each tensor `state_key/NAME` to what `read_tensor` returns; CheckpointError for another shape."""
        for name, parameter in self._parameters_with(state_key):
            full, dim = read_tensor(f"{state_key}/{name}"), self._shard_dims.get(name)
            part = full if dim is None else self._tensor_group.shard(full, dim)
            shape = getattr(parameter, "ds_shape", parameter.shape)  # at stage 3 the parameter itself is empty
            if part.shape != shape:
                raise CheckpointError(
                    f"the checkpoint's {state_key}/{name} must have the model's shape {tuple(shape)}, but has "
                    f"{tuple(part.shape)} instead; give `model` the sizes of that run."
                )
            self._states.set(parameter, state_key, part.to(self._device))

    def replicated_weights(self) -> dict[str, Tensor]:
        """This rank's weights as the forward pass uses them; at stage 3 they are empty."""
        return {name: weight.data for name, weight in self._parameters_with(WEIGHT)}

    def _parameters_with(self, state_key: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._parameters.items():
            if state_key == WEIGHT or state_key in self._moments.get(parameter, ()):
                yield name, parameter


_INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes per element."""


def weight_checksums(weights: Iterable[Tensor]) -> Tensor:
    """int64 [P] on the CPU: the sum of each tensor's elements with their bits read as integers; a flipped
    bit changes it. Reads the weights once."""
    sums = [weight.detach().view(_INT_DTYPES[weight.element_size()]).sum(dtype=torch.int64) for weight in weights]
    return torch.stack(sums).cpu()
