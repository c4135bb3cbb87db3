"""Compares weights that several ranks hold: the same bits on all of them, unless some have flipped on one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megahead.wording import counted, listed


@dataclass(frozen=True)
class OddReplica:
    """Ranks whose weights are not those of most replicas (of all replicas, where none are most), and which weights."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]

    def sentence(self, step: int, hosts: Sequence[str]) -> str:
        first, *others = self.names
        where = ", ".join(sorted({hosts[rank] for rank in self.ranks}))
        more = f" and {counted(len(others), 'other weight')}" if others else ""
        return f"step {step:,}: {listed('rank', self.ranks)} ({where}) and other replicas differ in {first}{more}"


def odd_replica(sums_DTP: Tensor, names: Sequence[str]) -> OddReplica | None:
    """`sums_DTP`: checksums of P weights on D data ranks x T tensor ranks, whose world rank is data rank * T + tensor
    rank; None if data ranks agree."""
    data, tensor, _ = sums_DTP.shape
    ranks, odd_names = set(), set()
    for t in range(tensor):
        for p, name in enumerate(names):
            sums = sums_DTP[:, t, p].tolist()
            value, times = Counter(sums).most_common(1)[0]
            if times == data:
                continue
            odd_names.add(name)
            ranks |= {d * tensor + t for d in range(data) if 2 * times <= data or sums[d] != value}
    return OddReplica(tuple(sorted(ranks)), tuple(name for name in names if name in odd_names)) if ranks else None
