"""Muon under ZeRO and tensor parallelism: gathers the fragments of each matrix before it is orthogonalized.

Momentum and weights stay partitioned, because their updates are elementwise. The momentum is gathered in bf16, to which
Muon rounds it anyway, so that updates are bitwise equal to those of unpartitioned matrices.

Shapes: R data ranks, n elements of a partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megahead.distributed.group import Group, Mesh
from megahead.optim import Muon, orthogonalize


@dataclass(frozen=True)
class Fragment:
    """The part of a matrix in one data rank's partition; both slices are empty if the rank has no part."""

    in_partition: slice
    """The slice of the rank's flat partition."""

    in_matrix: slice
    """The slice of the flattened matrix."""


@dataclass(frozen=True)
class PartitionedMatrix:
    """A matrix, or a tensor rank's shard of one, partitioned over the data ranks."""

    shape: torch.Size
    shard_dim: int | None
    """The dim along which tensor ranks shard it; None: it is replicated over them."""

    fragments: Sequence[Fragment]
    """One for each data rank."""


class GatheredUpdates:
    """A `Muon.compute_update`. `matrices` lists the matrices in each flat parameter of the optimizer."""

    def __init__(
        self,
        matrices: Mapping[Tensor, Sequence[PartitionedMatrix]],
        data_group: Group,
        tensor_group: Group,
        device: torch.device,
    ) -> None:
        self._matrices, self._data_group, self._tensor_group, self._device = matrices, data_group, tensor_group, device

    def __call__(self, flat: Tensor, momentum: Tensor, qkv_head_size: int | None) -> Tensor:
        """Each rank orthogonalizes the matrices of which it has a fragment. Collective.

        `qkv_head_size`: that of fused QKV projections, whose Q, K and V are orthogonalized separately; None: others.
        """
        gathered_Rn = self._data_group.all_gather(momentum.flatten().bfloat16().to(self._device))
        update_n = torch.zeros(momentum.numel(), device=self._device)
        for matrix in self._matrices[flat]:
            local = matrix.fragments[self._data_group.rank]
            if local.in_partition.start < local.in_partition.stop:
                pairs = zip(gathered_Rn, matrix.fragments, strict=True)
                full = torch.cat([partition[fragment.in_partition] for partition, fragment in pairs])
                update = self._orthogonalize(full.view(matrix.shape), matrix.shard_dim, qkv_head_size)
                update_n[local.in_partition] = update[local.in_matrix]
        return update_n.to(momentum.device).view_as(momentum)

    def _orthogonalize(self, matrix: Tensor, shard_dim: int | None, qkv_head_size: int | None) -> Tensor:
        """The flat update. Tensor ranks have the same fragments of their shards, and call this in the same order."""
        if shard_dim is None:
            return orthogonalize(matrix, qkv_head_size).flatten()
        full = orthogonalize(self._tensor_group.unshard(matrix, shard_dim), qkv_head_size)
        return self._tensor_group.shard(full, shard_dim).flatten()


def gather_for_muon(deepspeed: Any, muon: Muon, stage: int, mesh: Mesh, dims: Mapping[Tensor, int]) -> None:
    """Sets the `compute_update` of `muon`, the optimizer of an initialized `DeepSpeedEngine`. `dims`: along which dims
    tensor ranks shard parameters."""
    list_matrices = (_unpartitioned, _partitioned_flat, _partitioned_flat, _partitioned_per_parameter)[stage]
    matrices = dict(list_matrices(deepspeed.optimizer, mesh.data_group, dims))
    data_group = mesh.data_group if stage else Group()
    muon.compute_update = GatheredUpdates(matrices, data_group, mesh.tensor_group, deepspeed.device)


PartitionedMatrices = Iterator[tuple[Tensor, Sequence[PartitionedMatrix]]]


def _unpartitioned(optimizer: Any, data_group: Group, dims: Mapping[Tensor, int]) -> PartitionedMatrices:
    """Stage 0: every data rank has every parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["is_muon"] else ():
            full = slice(0, parameter.numel())
            yield parameter, [PartitionedMatrix(parameter.shape, dims.get(parameter), [Fragment(full, full)])]


def _partitioned_flat(optimizer: Any, data_group: Group, dims: Mapping[Tensor, int]) -> PartitionedMatrices:
    """Stages 1 and 2: a group's parameters are concatenated in a flat tensor, which is split equally over the ranks."""
    for index, group in enumerate(optimizer.param_groups):
        if group["is_muon"]:
            (flat,) = group["params"]
            matrices = []
            for parameter, offset in _offsets(optimizer, index):
                size, ranks = flat.numel(), range(data_group.size)
                fragments = [_overlap(offset, parameter.numel(), rank * size, size) for rank in ranks]
                matrices.append(PartitionedMatrix(parameter.shape, dims.get(parameter), fragments))
            yield flat, matrices


def _offsets(optimizer: Any, index: int) -> Iterator[tuple[Tensor, int]]:
    """The parameters of a group with their offsets in the flat tensor."""
    if hasattr(optimizer, "round_robin_bit16_groups"):
        offsets = optimizer.round_robin_bit16_offsets[index]
        yield from zip(optimizer.round_robin_bit16_groups[index], offsets, strict=True)
        return
    offset = 0
    for parameter in optimizer.bf16_groups[index]:
        yield parameter, offset
        offset += parameter.numel()


def _overlap(offset: int, numel: int, partition_offset: int, partition_size: int, base: int = 0) -> Fragment:
    """The overlap of a matrix with a partition. Both are `numel` and `partition_size` elements from `offset` and
    `partition_offset` on; the partition begins at index `base` of the rank's flat tensor."""
    start = min(max(offset, partition_offset), partition_offset + partition_size)
    stop = max(min(offset + numel, partition_offset + partition_size), start)
    shift = base - partition_offset
    return Fragment(slice(start + shift, stop + shift), slice(start - offset, stop - offset))


def _partitioned_per_parameter(optimizer: Any, data_group: Group, dims: Mapping[Tensor, int]) -> PartitionedMatrices:
    """Stage 3: each parameter is split equally over the ranks, and the last fragment is padded."""
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        if optimizer.param_groups[optimizer.sub_group_to_group_id[index]]["is_muon"]:
            matrices, offset = [], 0
            for parameter in optimizer.fp16_groups[index]:
                length, ranks = parameter.ds_tensor.numel(), range(data_group.size)
                fragments = [_overlap(0, parameter.ds_numel, rank * length, length, offset) for rank in ranks]
                matrices.append(PartitionedMatrix(parameter.ds_shape, dims.get(parameter), fragments))
                offset += length
            yield flat, matrices
