"""Weights and optimizer state as whole named tensors, read from DeepSpeed and set there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from megahead.optim import MOMENTUM


class FrozenWeights:
    """Frozen parameters in fp32, in the host's memory, partitioned over `data_group`; only checkpoints need them."""

    def __init__(self, data_group: Group, device: torch.device) -> None:
        self._data_group = data_group
        self._device = device
        self._kept: dict[nn.Parameter, tuple[Tensor, torch.Size]] = {}

    def store(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Stores this rank's slice of `full`, the full value of `parameter`. Sends nothing."""
        flat = functional.pad(full.detach().flatten().float(), (0, -full.numel() % self._data_group.size))
        self._kept[parameter] = self._data_group.shard(flat, 0).cpu(), full.shape

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """The full value that was stored, on the device; None if there is none. Collective."""
        if parameter not in self._kept:
            return None
        part, shape = self._kept[parameter]
        return self._data_group.unshard(part.to(self._device), 0)[: shape.numel()].view(shape)


# Weights and Adam's state as full (unpartitioned) tensors, at any ZeRO stage.
#
# DeepSpeed keeps up to three tensors per parameter: the model's own copy (in the format of the forward pass), an fp32
# master copy, and the optimizer's state, the last two in slices of a flat buffer per rank. `open_parameter_states`
# hides where they are: `get` and `set` read and write one parameter, in full and in fp32.


WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


def open_parameter_states(engine: Any, stage: int, data_group: Group) -> ReplicatedStates | PartitionedStates:
    """The states of a `DeepSpeedEngine`'s parameters, partitioned over `data_group`; Adam's moments start as zeros.
    They read and write one parameter at a time, whose `kind` is WEIGHT or one of MOMENTS; every call is collective.

    They must exist before the first step: at stages 1 and 2 DeepSpeed links the state of all groups once, right after
    the first group has stepped, when the others still have none. The memory peak stays the same.
    """
    optimizer = engine.optimizer
    if stage == 0:
        _make_moments(optimizer, _parameters(optimizer))
        return ReplicatedStates(optimizer)
    frozen = FrozenWeights(data_group, engine.device)
    if stage == 3:
        groups = (optimizer.param_groups[index] for index in optimizer.sub_group_to_group_id.values())
        _make_moments(optimizer.optimizer, zip(groups, optimizer.fp32_partitioned_groups_flat, strict=True))
        return ShardedStates(frozen)
    _make_moments(optimizer.optimizer, _parameters(optimizer))
    if getattr(optimizer, "round_robin_gradients", False):
        _link_round_robin(optimizer)
    optimizer._lazy_init_hp_params_optimizer_state()
    return PartitionedStates(frozen)


def moment_names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """What an optimizer keeps beside each weight of a parameter group."""
    return (MOMENTUM,) if group.get("orthogonal") else MOMENTS


Member = tuple[Mapping[str, Any], Tensor]


def _parameters(optimizer: Any) -> Iterator[Member]:
    return ((group, tensor) for group in optimizer.param_groups for tensor in group["params"])


def _make_moments(adam: torch.optim.Optimizer, members: Iterable[Member]) -> None:
    """The state that the optimizer itself would make at its first step, with the names of its `state_dict`."""
    for group, tensor in members:
        on_device = group.get("capturable") or group.get("fused")
        adam.state[tensor] = {
            "step": torch.zeros((), device=tensor.device if on_device else "cpu"),
            **{kind: torch.zeros_like(tensor, requires_grad=False) for kind in moment_names(group)},
        }


def _link_round_robin(optimizer: Any) -> None:
    """Corrects DeepSpeed's accessors for `round_robin_gradients`, where slices are in another order than they assume:
    on two or more ranks they would read and write other parameters' values."""
    from deepspeed.utils import link_hp_params

    for index, parameters in enumerate(optimizer.bit16_groups):
        laid_out, starts = optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index]
        start_of = {id(parameter): start for parameter, start in zip(laid_out, starts, strict=True)}
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
            param_offsets=[start_of[id(parameter)] for parameter in parameters],
        )


class ReplicatedStates:
    """Stage 0: every rank holds everything; nothing is sent."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._states = optimizer.state

    def get(self, parameter: nn.Parameter, kind: str) -> Tensor:
        full: Tensor = parameter.detach() if kind == WEIGHT else self._states[parameter][kind]
        return full

    def set(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        self.get(parameter, kind).copy_(value)


class PartitionedStates:
    """Stages 1 and 2: masters and moments are partitioned, the model's copy is full on every rank.

    DeepSpeed's accessors read a parameter by an all-reduce of the full tensor, and write without sending. Frozen
    parameters have no master: the accessors return None for them. They never write the model's copy.
    """

    def __init__(self, frozen: FrozenWeights) -> None:
        self._frozen = frozen

    def get(self, parameter: nn.Parameter, kind: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not parameter.requires_grad:
            kept = self._frozen.read(parameter)
            return self._get_copy(parameter) if kept is None else kept
        weight = kind == WEIGHT
        full = safe_get_full_fp32_param(parameter) if weight else safe_get_full_optimizer_state(parameter, kind)
        return cast(Tensor, full)

    def set(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        if parameter.requires_grad:
            self._set_slice(parameter, kind, value)
        elif parameter.dtype != torch.float32:
            self._frozen.store(parameter, value)
        if kind == WEIGHT:
            self._set_copy(parameter, value)

    def _get_copy(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def _set_copy(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.data.copy_(value)

    def _set_slice(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if kind == WEIGHT:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, kind)


class ShardedStates(PartitionedStates):
    """Stage 3: the model's copy is partitioned too; it is gathered to be read, and sent by the first rank to be set."""

    def _get_copy(self, parameter: nn.Parameter) -> Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _set_copy(self, parameter: nn.Parameter, value: Tensor) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)

    def _set_slice(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        """Sets this rank's slice: DeepSpeed's accessors of full tensors fail where slices reach beyond the tensor."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        length = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        start = length * parameter._z3_optimizer._get_param_partition_rank(parameter)  # type: ignore[attr-defined]
        part = value.flatten()[start : start + length]
        part = functional.pad(part, (0, length - len(part)))
        if kind == WEIGHT:
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_local_optimizer_state(parameter, part, kind)


class FullState:
    """Weights, and what the optimizer keeps beside them. All but `replicated` is collective."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        moments: Mapping[Tensor, Sequence[str]],
        states: ReplicatedStates | PartitionedStates,
        shard_dims: Mapping[str, int],
        tensor_group: Group,
        device: torch.device,
    ) -> None:
        """`moments`: which ones each trained parameter has; `shard_dims`: along which dimension a parameter is split
        over `tensor_group`, if it is."""
        self._parameters, self._moments, self._states = parameters, moments, states
        self._shard_dims, self._tensor_group, self._device = shard_dims, tensor_group, device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each as `KIND/NAME`, in fp32; one is in memory at a time."""
        for kind in (WEIGHT, *MOMENTS):
            for name, parameter in self._with(kind):
                part, dim = self._states.get(parameter, kind), self._shard_dims.get(name)
                full = part if dim is None else self._tensor_group.unshard(part, dim)
                yield f"{kind}/{name}", full.detach().float()

    def set(self, kind: str, read: Callable[[str], Tensor]) -> None:
        """Sets all of a kind to what `read` returns; CheckpointError for another shape."""
        for name, parameter in self._with(kind):
            full, dim = read(f"{kind}/{name}"), self._shard_dims.get(name)
            part = full if dim is None else self._tensor_group.shard(full, dim)
            shape = getattr(parameter, "ds_shape", parameter.shape)  # at stage 3 the parameter itself is empty
            if part.shape != shape:
                raise CheckpointError(
                    f"the checkpoint's {kind}/{name} must have the model's shape {tuple(shape)}, but has "
                    f"{tuple(part.shape)} instead; give `model` the sizes of that run."
                )
            self._states.set(parameter, kind, part.to(self._device))

    def replicated_weights(self) -> dict[str, Tensor]:
        """This rank's weights as the forward pass uses them; at stage 3 they are empty."""
        return {name: weight.data for name, weight in self._with(WEIGHT)}

    def _with(self, kind: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._parameters.items():
            if kind == WEIGHT or kind in self._moments.get(parameter, ()):
                yield name, parameter


# Checksums over weights: equal on replicas, which hold the same bits, as long as no bit has flipped.


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weight_checksums(weights: Iterable[Tensor]) -> Tensor:
    """int64 [P] on the CPU: each tensor's bits, read as whole numbers of its width and summed up. A flipped bit changes
    its sum; reads the weights once."""
    sums = [weight.detach().view(_WHOLE[weight.element_size()]).sum(dtype=torch.int64) for weight in weights]
    return torch.stack(sums).cpu()
