"""How close WordNet's synonyms are in a model's input embedding, against random pairs of the same words (the paper's
figure 9).

A synset line of WordNet's data files: `offset file type count word id word id ... relations | gloss`, `count` in
hexadecimal (wndb(5WN)). P pairs, V vocabulary, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.corpus.tokenizer import Tokenizer
from megahead.errors import DataError

Pair = tuple[str, str]
_PARTS = ("noun", "verb", "adj", "adv")


@dataclass(frozen=True)
class Similarities:
    """Cosines of one model's pairs."""

    synonyms_P: Tensor
    random_P: Tensor

    def gap(self) -> float:
        """How much closer synonyms are than random pairs, on average."""
        return float(self.synonyms_P.mean() - self.random_P.mean())


def synonym_pairs(wordnet: Path) -> list[Pair]:
    """Every pair of single words that share a synset in the folder `wordnet` (data.noun and so on), once, sorted."""
    pairs: set[Pair] = set()
    for part in _PARTS:
        file = wordnet / f"data.{part}"
        if not file.is_file():
            raise DataError(
                f"`{wordnet}` must hold WordNet's data.{part}, but lacks it; install Debian's wordnet-base or "
                "name another folder with --wordnet."
            )
        for words in _synsets(file):
            pairs.update(combinations(sorted(words), 2))
    return sorted(pairs)


def _synsets(file: Path) -> Iterator[set[str]]:
    """The single words of each synset, in lower case, without an adjective's position as in `(p)`."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(" "):  # the licence
            continue
        fields = line.split(" ")
        try:
            count = int(fields[3], 16)
            words = [fields[4 + 2 * k].partition("(")[0].lower() for k in range(count)]
        except (IndexError, ValueError):
            raise DataError(f"`{file}` must hold synsets of WordNet, but has the line {line[:40]!r}.") from None
        yield {word for word in words if word.isalpha()}


def similarities(weight_VD: Tensor, tokenizer: Tokenizer, pairs: Sequence[Pair], seed: int = 0) -> Similarities:
    """Cosines of those pairs whose words are one token each (with a space before), and of as many random pairs of them.

    Raises DataError when there are none of either.
    """
    words = sorted({word for pair in pairs for word in pair})
    before, *encoded = tokenizer.encode_batch(["a", *(f"a {word}" for word in words)])  # the space is no first one
    added = {word: ids[len(before) :] for word, ids in zip(words, encoded, strict=True) if ids[: len(before)] == before}
    ids = {word: own[0] for word, own in added.items() if len(own) == 1}
    known = [(ids[a], ids[b]) for a, b in pairs if a in ids and b in ids and ids[a] != ids[b]]
    if not known:
        raise DataError("the tokenizer must know both words of some pair as one token, but knows none.")
    ids_P2 = torch.tensor(known)
    unit_VD = F.normalize(weight_VD.double(), dim=-1)
    random_P2 = _random_pairs(ids_P2, known, seed)
    if not len(random_P2):
        raise DataError("the synonyms must be enough to draw other pairs of their words from, but are too few.")
    return Similarities(_cosines(unit_VD, ids_P2), _cosines(unit_VD, random_P2))


def _cosines(unit_VD: Tensor, ids_P2: Tensor) -> Tensor:
    return (unit_VD[ids_P2[:, 0]] * unit_VD[ids_P2[:, 1]]).sum(-1)


def _random_pairs(ids_P2: Tensor, known: Sequence[tuple[int, int]], seed: int) -> Tensor:
    """The pairs with their second words shuffled; without pairs of synonyms or of equal words."""
    drawn = np.random.default_rng(seed).permutation(ids_P2[:, 1].numpy())
    excluded = {*known, *((b, a) for a, b in known)}
    kept = [(a, b) for a, b in zip(ids_P2[:, 0].tolist(), drawn.tolist(), strict=True) if a != b]
    kept = [pair for pair in kept if pair not in excluded]
    return torch.tensor(kept, dtype=torch.long).view(-1, 2)
