"""Pseudo-perplexity of an encoder (Salazar et al. 2020, arXiv 1910.14659): each token guessed from all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megahead.convert import load_masked, load_tokenizer_folder
from megahead.errors import CheckpointError, DataError

Masked = tuple[list[int], int, int]
"""A text with one token masked, where, and which token it was."""


@dataclass(frozen=True)
class PseudoPerplexity:
    """How well the tokens of texts are guessed, each with the whole rest of its text in view."""

    tokens: int
    loss: float
    """Mean negative log-probability of a token in nats."""

    def perplexity(self) -> float:
        """exp(loss); not comparable with a decoder's, whose tokens see only what came before."""
        return exp(self.loss)


@torch.no_grad()
def pseudo_perplexity(
    model_dir: Path, texts: Sequence[str], *, max_length: int = 128, batch_size: int = 64
) -> PseudoPerplexity:
    """Scores every token of `texts` (each cut at `max_length` tokens) with the masked language model in `model_dir`.

    Cost: a forward pass over a text for each of its tokens. Raises CheckpointError for a folder without a masked
    language model or a tokenizer with [CLS], [SEP] and [MASK], DataError for texts without a token.
    """
    tokenizer, model = load_tokenizer_folder(model_dir), load_masked(model_dir)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    rows = sorted(
        _masked(texts, _special_ids(tokenizer, model_dir), tokenizer, max_length), key=lambda row: -len(row[0])
    )
    if not rows:
        raise DataError("The texts must hold tokens to guess, but hold none.")
    nats = 0.0
    for start in range(0, len(rows), batch_size):
        nats -= float(_log_probabilities(model, rows[start : start + batch_size]).sum())
    return PseudoPerplexity(len(rows), nats / len(rows))


def _masked(texts: Sequence[str], special: tuple[int, int, int], tokenizer: Any, max_length: int) -> Iterator[Masked]:
    """Every text as often as it has tokens, another one masked each time."""
    start, end, mask = special
    for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]:
        row = [start, *ids[: max_length - 2], end]
        for place in range(1, len(row) - 1):
            yield [*row[:place], mask, *row[place + 1 :]], place, row[place]


def _log_probabilities(model: Any, rows: Sequence[Masked]) -> Tensor:
    """[B]: of each row's own token at its mask."""
    longest = max(len(ids) for ids, _, _ in rows)
    ids_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _, _ in rows], device=model.device)
    seen_BT = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _, _ in rows], device=model.device)
    place_B, token_B = (torch.tensor(column, device=model.device) for column in list(zip(*rows, strict=True))[1:])
    logits_BTV: Tensor = model(input_ids=ids_BT, attention_mask=seen_BT).logits
    at_mask_BV = logits_BTV[torch.arange(len(rows), device=model.device), place_B].float()
    return at_mask_BV.log_softmax(-1).gather(1, token_B[:, None])[:, 0]


def _special_ids(tokenizer: Any, model_dir: Path) -> tuple[int, int, int]:
    vocabulary = tokenizer.get_vocab()
    names = [(tokenizer.cls_token, "[CLS]"), (tokenizer.sep_token, "[SEP]"), (tokenizer.mask_token, "[MASK]")]
    found = [vocabulary.get(named or usual) for named, usual in names]
    if None in found:
        raise CheckpointError(f"`{model_dir}` must hold a tokenizer with [CLS], [SEP] and [MASK], but it lacks one.")
    return found[0], found[1], found[2]
