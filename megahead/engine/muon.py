"""Whole matrices for Muon, out of the pieces of them that ZeRO and tensor ranks hold.

Momentum and weights stay in pieces: those are moved number by number. Only what is to be made orthogonal is gathered,
in bf16, to which Muon rounds it anyway, so that updates are bit for bit those of whole matrices.
R data ranks; n: the numbers that each holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megahead.distributed.group import Group, Mesh
from megahead.optim import Muon, scaled_orthogonal


@dataclass(frozen=True)
class Piece:
    """The part of a matrix that one data rank holds; of both it is none where it holds nothing."""

    held: slice
    """Where it lies among all that the rank holds together with it."""

    of_matrix: slice
    """Which of the matrix's numbers it is."""


@dataclass(frozen=True)
class CutMatrix:
    """A matrix, or a tensor rank's share of one, cut up over the data ranks."""

    shape: torch.Size
    shard_dim: int | None
    """The dim along which tensor ranks share it; None: each has all of it."""

    pieces: Sequence[Piece]
    """Of each data rank."""


class WholeMatrices:
    """A `Muon.whole_update`: `cut` says which matrices are in what the optimizer holds as one parameter."""

    def __init__(
        self, cut: Mapping[Tensor, Sequence[CutMatrix]], data_group: Group, tensor_group: Group, device: torch.device
    ) -> None:
        self._cut, self._data_group, self._tensor_group, self._device = cut, data_group, tensor_group, device

    def __call__(self, held: Tensor, momentum: Tensor, joint_head: int | None) -> Tensor:
        """Each rank makes those matrices orthogonal of which it holds a piece. Collective."""
        gathered_Rn = self._data_group.all_gather(momentum.flatten().bfloat16().to(self._device))
        update_n = torch.zeros(momentum.numel(), device=self._device)
        for matrix in self._cut[held]:
            mine = matrix.pieces[self._data_group.rank]
            if mine.held.start < mine.held.stop:
                whole = torch.cat([row[piece.held] for row, piece in zip(gathered_Rn, matrix.pieces, strict=True)])
                made = self._orthogonal(whole.view(matrix.shape), matrix.shard_dim, joint_head)
                update_n[mine.held] = made[mine.of_matrix]
        return update_n.to(momentum.device).view_as(momentum)

    def _orthogonal(self, matrix: Tensor, shard_dim: int | None, joint_head: int | None) -> Tensor:
        """Flat; its tensor peers hold the same pieces of their shares, and call this in the same order."""
        if shard_dim is None:
            return scaled_orthogonal(matrix, joint_head).flatten()
        whole = scaled_orthogonal(self._tensor_group.unshard(matrix, shard_dim), joint_head)
        return self._tensor_group.shard(whole, shard_dim).flatten()


def gather_for_muon(deepspeed: Any, muon: Muon, stage: int, mesh: Mesh, dims: Mapping[Tensor, int]) -> None:
    """Has `muon`, the optimizer of a started `DeepSpeedEngine`, find whole matrices. `dims`: of parameters that tensor
    ranks share, the dim along which."""
    layout = {0: _uncut, 1: _cut_flat, 2: _cut_flat, 3: _cut_each}[stage]
    cut = dict(layout(deepspeed.optimizer, mesh.data_group, dims))
    data_group = mesh.data_group if stage else Group()
    muon.whole_update = WholeMatrices(cut, data_group, mesh.tensor_group, deepspeed.device)


Cut = Iterator[tuple[Tensor, Sequence[CutMatrix]]]


def _uncut(optimizer: Any, data_group: Group, dims: Mapping[Tensor, int]) -> Cut:
    """Stage 0: every data rank holds every parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["orthogonal"] else ():
            every = slice(0, parameter.numel())
            yield parameter, [CutMatrix(parameter.shape, dims.get(parameter), [Piece(every, every)])]


def _cut_flat(optimizer: Any, data_group: Group, dims: Mapping[Tensor, int]) -> Cut:
    """Stages 1 and 2: the parameters of a group lie one behind the other in a flat tensor, cut in equal pieces."""
    for index, group in enumerate(optimizer.param_groups):
        if group["orthogonal"]:
            (held,) = group["params"]
            cut = []
            for parameter, start in _laid_out(optimizer, index):
                size, ranks = held.numel(), range(data_group.size)
                pieces = [_overlap(start, parameter.numel(), rank * size, size) for rank in ranks]
                cut.append(CutMatrix(parameter.shape, dims.get(parameter), pieces))
            yield held, cut


def _laid_out(optimizer: Any, index: int) -> Iterator[tuple[Tensor, int]]:
    """The parameters of a group with the places where they begin."""
    if hasattr(optimizer, "round_robin_bit16_groups"):
        starts = optimizer.round_robin_bit16_offsets[index]
        yield from zip(optimizer.round_robin_bit16_groups[index], starts, strict=True)
        return
    start = 0
    for parameter in optimizer.bf16_groups[index]:
        yield parameter, start
        start += parameter.numel()


def _overlap(start: int, count: int, first: int, size: int) -> Piece:
    """Of `count` numbers from `start` on those that are among `size` from `first` on."""
    begin = min(max(start, first), first + size)
    end = max(min(start + count, first + size), begin)
    return Piece(slice(begin - first, end - first), slice(begin - start, end - start))


def _cut_each(optimizer: Any, data_group: Group, dims: Mapping[Tensor, int]) -> Cut:
    """Stage 3: each parameter is cut in equal pieces, the last of them filled up."""
    for index, held in enumerate(optimizer.fp32_partitioned_groups_flat):
        if optimizer.param_groups[optimizer.sub_group_to_group_id[index]]["orthogonal"]:
            cut, place = [], 0
            for parameter in optimizer.fp16_groups[index]:
                length = parameter.ds_tensor.numel()
                pieces = [_own_piece(place, length, r, parameter.ds_numel) for r in range(data_group.size)]
                cut.append(CutMatrix(parameter.ds_shape, dims.get(parameter), pieces))
                place += length
            yield held, cut


def _own_piece(place: int, length: int, rank: int, numbers: int) -> Piece:
    """The piece of `length` that begins at `place` of what each rank holds."""
    begin, end = min(rank * length, numbers), min((rank + 1) * length, numbers)
    return Piece(slice(place, place + end - begin), slice(begin, end))
