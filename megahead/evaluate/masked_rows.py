"""Rows with which an encoder scores a text: one for each token, in which that token is masked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megahead.errors import CheckpointError
from megahead.evaluate.predictions import Row


class MaskedRows:
    """Makes rows with an encoder's tokenizer; CheckpointError if that lacks [CLS], [SEP] or [MASK]."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._start, self._end, self._mask = _special_ids(tokenizer, folder)

    def of_texts(self, texts: Sequence[str], *, whole_words: bool, max_length: int | None = None) -> list[list[Row]]:
        """For each text one row per token; texts are cut at `max_length` tokens.

        whole_words: the tokens after it in the same word are masked too. Otherwise the tokens of a long word give each
        other away, and rare words count as likely (Kauf & Ivanova 2023, arXiv 2305.10588).
        """
        if not texts:
            return []
        kept = None if max_length is None else max_length - 2
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        rows = []
        for k, ids in enumerate(encoded["input_ids"]):
            words = encoded.word_ids(k) if whole_words else range(len(ids))
            rows.append(list(self._of_tokens(ids[:kept], list(words)[:kept])))
        return rows

    def _of_tokens(self, ids: list[int], words: Sequence[int | None]) -> Iterator[Row]:
        for place, token in enumerate(ids):
            end = place + 1
            while end < len(ids) and words[end] is not None and words[end] == words[place]:
                end += 1
            masked = [self._start, *ids[:place], *[self._mask] * (end - place), *ids[end:], self._end]
            yield Row(tuple(masked), (place + 1,), (token,))


def _special_ids(tokenizer: Any, folder: Path) -> tuple[int, int, int]:
    vocabulary = tokenizer.get_vocab()
    names = [(tokenizer.cls_token, "[CLS]"), (tokenizer.sep_token, "[SEP]"), (tokenizer.mask_token, "[MASK]")]
    found = [vocabulary.get(named or usual) for named, usual in names]
    if None in found:
        raise CheckpointError(f"`{folder}` must hold a tokenizer with [CLS], [SEP] and [MASK], but it lacks one.")
    return found[0], found[1], found[2]
