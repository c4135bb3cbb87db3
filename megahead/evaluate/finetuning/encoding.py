"""Turns texts into padded batches: tokenizes, joins and cuts them once, then batches them by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megahead.evaluate.finetuning.examples import Example

_SORTED_TOGETHER = 50  # batches whose rows are sorted by length together: little padding remains


@dataclass(frozen=True)
class Encoded:
    """A tokenized example, one sequence for each choice."""

    sequences: tuple[tuple[list[int], list[int]], ...]
    """Token ids and their token types: 0 for the first text, 1 for the second."""

    label: float

    def length(self) -> int:
        """Tokens of its longest sequence."""
        return max(len(ids) for ids, _ in self.sequences)


class ExampleEncoder:
    """Joins a pair of texts as an encoder's tokenizer would, `[CLS] a [SEP] b [SEP]`; for decoders as two lines."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        start, end = (_special(tokenizer, *names) for names in (("cls_token", "[CLS]"), ("sep_token", "[SEP]")))
        if start is not None and end is not None:
            self._open, self._between, self._close = [start], [end], [end]
        else:
            self._open, self._between, self._close = [], self._ids(["\n"])[0], []

    def encode(self, examples: Sequence[Example]) -> list[Encoded]:
        """Tokens of all examples, in their order."""
        firsts = self._ids([example.first for example in examples])
        seconds = iter(self._ids([second for example in examples for second in example.seconds if second is not None]))
        return [
            Encoded(
                tuple(self._joined(first, None if second is None else next(seconds)) for second in example.seconds),
                example.label,
            )
            for example, first in zip(examples, firsts, strict=True)
        ]

    def _joined(self, first: list[int], second: list[int] | None) -> tuple[list[int], list[int]]:
        """One sequence; if two texts are too long together, the longer one is cut."""
        room = self._max_length - len(self._open) - len(self._close)
        if second is None:
            ids = [*self._open, *first[:room], *self._close]
            return ids, [0] * len(ids)
        kept, kept_second = shares(len(first), len(second), room - len(self._between))
        start = [*self._open, *first[:kept], *self._between]
        end = [*second[:kept_second], *self._close]
        return start + end, [0] * len(start) + [1] * len(end)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return ids


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens to keep of two texts: the longer one is cut until both are equal, then both."""
    shorter, longer = min(first, second), max(first, second)
    if shorter + longer > room:
        shorter, longer = (shorter, room - shorter) if shorter <= room // 2 else (room // 2, room - room // 2)
    return (longer, shorter) if first > second else (shorter, longer)


def training_batches(lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Every row once, in random batches of rows of similar length; all batches but one are full."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    reach = batch_size * _SORTED_TOGETHER
    grouped = [k for start in range(0, len(order), reach) for k in by_length(lengths, order[start : start + reach])]
    batches = [grouped[start : start + batch_size] for start in range(0, len(grouped), batch_size)]
    yield from (batches[k] for k in torch.randperm(len(batches), generator=generator).tolist())


def by_length(lengths: Sequence[int], rows: Sequence[int]) -> list[int]:
    """`rows`, the longest first."""
    return sorted(rows, key=lambda row: -lengths[row])


def collate(examples: Sequence[Encoded], padding: int, device: torch.device) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `token_type_ids`, [examples x choices, longest], padded on the right."""
    sequences = [sequence for example in examples for sequence in example.sequences]
    longest = max(len(ids) for ids, _ in sequences)
    rows = [
        (ids + [padding] * (gap := longest - len(ids)), [1] * len(ids) + [0] * gap, token_types + [0] * gap)
        for ids, token_types in sequences
    ]
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: torch.tensor(part, device=device) for name, part in zip(names, zip(*rows, strict=True), strict=True)}


def _special(tokenizer: Any, attribute: str, usual: str) -> int | None:
    """The id of a special token by the tokenizer's own name for it, or its usual name; None if there is none."""
    token = getattr(tokenizer, attribute, None) or usual
    found = tokenizer.get_vocab().get(token)
    return None if found is None else int(found)
