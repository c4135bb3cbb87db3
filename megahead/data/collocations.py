"""Collocations: pairs of tokens that are neighbours far more often than by chance, found by counting the text.

Measured by pointwise mutual information, PMI(a, b) = log(p(ab) / (p(a) p(b))), in nats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megahead.corpus.indexed import IndexedDataset

Array = np.ndarray[Any, Any]

_CHUNK = 1 << 22  # tokens counted at once
MAX_TOKENS = 1 << 26
"""Tokens of each dataset that are counted, from its beginning: enough to find frequent pairs."""


@dataclass(frozen=True)
class Collocations:
    """A set of ordered pairs (a, b)."""

    codes: Array
    """int64, increasing: a * vocab_size + b."""

    vocab_size: int

    def contain(self, a: Array, b: Array) -> Array:
        """bool, of the shape of both: whether (a, b) is in the set."""
        wanted = a.astype(np.int64) * self.vocab_size + b
        if not len(self.codes):
            return np.zeros(wanted.shape, bool)
        places = np.minimum(np.searchsorted(self.codes, wanted), len(self.codes) - 1)
        found: Array = self.codes[places] == wanted
        return found

    @staticmethod
    def of(
        chunks: Iterable[Array], vocab_size: int, *, min_pmi: float, min_count: int, excluded: Sequence[int] = ()
    ) -> Collocations:
        """Counts neighbouring tokens in `chunks`; pairs with an `excluded` id are left out.

        About 0.3 s per million tokens; memory in proportion to the number of different pairs.
        """
        count_V = np.zeros(vocab_size, np.int64)
        codes, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for chunk in chunks:
            tokens = chunk.astype(np.int64)
            count_V += np.bincount(tokens, minlength=vocab_size)
            some, how_often = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
            codes, inverse = np.unique(np.concatenate([codes, some]), return_inverse=True)
            counts = np.bincount(inverse, np.concatenate([counts, how_often])).astype(np.int64)
        a, b = np.divmod(codes, vocab_size)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_p_V = np.log(count_V / max(int(count_V.sum()), 1))
            pmi = np.log(counts / max(int(counts.sum()), 1)) - log_p_V[a] - log_p_V[b]
        kept = (pmi >= min_pmi) & (counts >= min_count) & ~np.isin(a, excluded) & ~np.isin(b, excluded)
        return Collocations(codes[kept], vocab_size)


def token_chunks(datasets: Iterable[IndexedDataset]) -> Iterable[Array]:
    """The tokens of the datasets, in chunks; of each dataset the first MAX_TOKENS."""
    for dataset in datasets:
        end = min(dataset.num_tokens, MAX_TOKENS)
        for first in range(0, end, _CHUNK):
            yield dataset.read(first, min(_CHUNK, end - first))
