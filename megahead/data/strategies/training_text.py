"""What a masking strategy may know of the text that a run trains on; each is read when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megahead.config import RunConfig
from megahead.corpus.indexed import IndexedDataset
from megahead.corpus.spelling import bytes_of_ids
from megahead.data.difficulty import Difficulty
from megahead.data.strategies.pair_counts import PairCounts, token_chunks
from megahead.errors import ConfigError


@dataclass(frozen=True)
class TrainingText:
    """The datasets of a run."""

    config: RunConfig
    datasets: Sequence[IndexedDataset]

    setting: str
    """What asks for the strategy, for errors."""

    difficulty: Difficulty | None = None
    """How often the run misses each id, for a strategy that follows it (`MaskingConfig.adapts`)."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.model.vocab_size

    def special_ids(self) -> list[int]:
        """Ids that are never masked."""
        assert self.config.masking is not None
        return self.config.masking.never_masked(self.config.data.end_token)

    def bytes_of_ids(self) -> Sequence[bytes | None]:
        """What each id of the run's tokenizer stands for (`bytes_of_ids`)."""
        return bytes_of_ids(str(self.config.data.tokenizer), self.vocab_size)

    def pair_counts(self) -> PairCounts:
        """How often tokens are neighbours; reads the text."""
        return PairCounts.of(token_chunks(self.datasets), self.vocab_size)

    def token_counts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """int64 [V]: of all datasets together; ConfigError if one has none."""
        counts_V = np.zeros(self.vocab_size, np.int64)
        for dataset in self.datasets:
            if dataset.info is None:
                raise ConfigError(
                    self.setting,
                    "have a dataset with token counts (its .json file)",
                    got=self.config.flat()[self.setting],
                    hint="preprocess the text again, or change the strategy",
                )
            known = np.asarray(dataset.info.token_counts, np.int64)
            counts_V[: len(known)] += known
        return counts_V
