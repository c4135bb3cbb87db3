"""How often a model misses each id, by which a masking strategy chooses what to mask next.

Counts are whole numbers, so that sums over ranks are exact, and weights that follow from them are the same on any mesh
unless rounding turns a prediction over. Rows are masked ahead of the steps that learn from them: the rows of a period
(`every` steps of reading) are masked by what was counted up to the beginning of the period before, which is there in
time however far ahead they are prepared. V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megahead.distributed import Group
from megahead.errors import ConfigError


class Difficulty:
    """Misses and targets of each id, of steps that were applied; older ones count half as much with each period.

    `settle` is called after each step by the thread that trains, `at` by the one that reads.
    """

    def __init__(self, vocab_size: int, every: int, samples_per_step: int) -> None:
        self._every, self._samples_per_step = every, samples_per_step
        self._nothing = torch.zeros(vocab_size, 2, dtype=torch.int64)
        self._local = self._nothing.clone()  # this rank's since the last settlement; rank 0's with all before
        self._settled: dict[int, Tensor] = {0: self._nothing, 1: self._nothing}
        self._noted: list[tuple[Tensor, Tensor]] = []

    def note(self, ids_N: Tensor, missed_N: Tensor) -> None:
        """Of a forward pass: targets, and whether another candidate had a higher score. Waits for nothing."""
        self._noted.append((ids_N, missed_N))

    def settle(self, samples: int, applied: bool, group: Group) -> None:
        """After a step, when so many samples were read: counts what was noted, if it was applied. Only at the end of a
        period it waits for the device, and is collective over the data ranks."""
        noted, self._noted = self._noted, []
        for ids_N, missed_N in noted if applied else ():
            pairs_N2 = torch.stack([missed_N.long(), torch.ones_like(ids_N)], dim=1)
            self._local = self._local.to(ids_N.device)
            self._local.index_add_(0, ids_N, pairs_N2)
        period, inside = divmod(samples // self._samples_per_step, self._every)
        if inside == 0:
            total_V2 = self.total(group)
            self._settled = {period: self._settled[period], period + 1: total_V2}
            self._local = total_V2 // 2 if group.rank == 0 else torch.zeros_like(total_V2)

    def at(self, step: int) -> Tensor:
        """int64 [V, 2]: (misses, targets) of each id, by which rows of this step of reading are masked."""
        return self._settled[step // self._every]

    def total(self, group: Group) -> Tensor:
        """int64 [V, 2]: counts of all ranks since the last settlement, with what is left of those before."""
        return group.all_reduce_(self._local.to("cpu", copy=True))

    def state(self, group: Group) -> Tensor:
        """int64 [3, V, 2]: of this period, of the next one, and since. Collective."""
        return torch.stack([*self._settled.values(), self.total(group)])

    def restore(self, state_3V2: Tensor, samples: int, group: Group) -> None:
        """The inverse of `state`, when so many samples were read; ConfigError where a step would begin elsewhere than
        what was counted."""
        if samples % self._samples_per_step:
            rule = f"divide the {samples:,} samples that were read, as what is masked depends on the steps before"
            raise ConfigError("batch.global_size", rule, got=self._samples_per_step)
        now_V2, next_V2, since_V2 = state_3V2.unbind()
        period = samples // self._samples_per_step // self._every
        self._settled = {period: now_V2, period + 1: next_V2}
        self._local = since_V2.clone() if group.rank == 0 else torch.zeros_like(since_V2)
        self._noted = []
