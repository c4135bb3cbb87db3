"""Bytes that each rank passes to one other, in the background and in pieces, so that it can be ended between two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from megahead.distributed.group import Group

PIECE = 16 << 20
"""Bytes that are sent at a time: an eighth of a second at 1 Gb/s."""


def pass_on(group: Group, mine: Tensor, to: int, theirs: Mapping[int, Tensor], ends: Callable[[], bool]) -> bool:
    """Sends `mine` (uint8 [n]) to rank `to`, while the bytes that other ranks send here are received into `theirs`, by
    rank. Returns whether all came. Collective: `to` and `theirs` must agree over the ranks of `group` (gloo).

    Once `ends` is true a rank sends no further piece, and those that wait for it are told. It waits for each piece
    `group.timeout_seconds` at most.
    """
    outgoing, incoming = mine.split(PIECE), {rank: part.split(PIECE) for rank, part in theirs.items()}
    stopped, cut_short = False, set[int]()
    for number, piece in zip_longest(range(_most(outgoing, *incoming.values())), outgoing):
        sending = []
        if piece is not None and not stopped:
            stopped = ends()
            sending = _send(group, torch.tensor([not stopped]), to) + ([] if stopped else _send(group, piece, to))
        for rank, places in incoming.items():
            if number < len(places) and rank not in cut_short and not _receive(group, places[number], rank):
                cut_short.add(rank)
        for work in sending:
            work.wait()
    return not stopped and not cut_short


def _most(*lists: tuple[Tensor, ...]) -> int:
    return max(len(pieces) for pieces in lists)


def _send(group: Group, tensor: Tensor, to: int) -> list[dist.Work]:
    work = dist.isend(tensor, group=group.handle, group_dst=to)
    return [] if work is None else [work]


def _receive(group: Group, place: Tensor, rank: int) -> bool:
    """Whether a piece came, and not word that none will."""
    comes = torch.empty(1, dtype=torch.bool)
    dist.recv(comes, group=group.handle, group_src=rank)
    if comes:
        dist.recv(place, group=group.handle, group_src=rank)
    return bool(comes)
