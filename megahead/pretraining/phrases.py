"""What a model learns of masked phrases beside its masked tokens. M = B T tokens, D features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megahead.config import PhrasesConfig
from megahead.data import MaskedPhrases
from megahead.objectives import PhraseSums, phrase_sums


class PhraseLoss:
    """Of all groups of a batch; `note`, where something wants to know, is told their sums."""

    def __init__(self, asked: PhrasesConfig) -> None:
        self._asked = asked
        self.note: Callable[[PhraseSums[Tensor]], None] | None = None

    def __call__(self, outputs_MD: Tensor, groups: Sequence[MaskedPhrases]) -> Tensor:
        """Scalar, summed over all ends by their weight. outputs_MD: of all tokens, rows concatenated."""
        of_groups = zip(*(self._sums(outputs_MD, group) for group in groups), strict=True)
        sums = PhraseSums(*(torch.stack(values).sum() for values in of_groups))
        if self.note is not None:
            self.note(sums)
        return self._asked.weight * sums.loss

    def _sums(self, outputs_MD: Tensor, group: MaskedPhrases) -> PhraseSums[Tensor]:
        ends_QD, candidates_KD = (outputs_MD.index_select(0, at) for at in (group.ends_Q, group.candidates_K))
        temperature = self._asked.temperature or outputs_MD.shape[1] ** 0.5
        row_Q, row_K = (at // group.row_length for at in (group.ends_Q, group.candidates_K))
        return phrase_sums(ends_QD, candidates_KD, row_Q[:, None] != row_K, group.right_QR, temperature)
