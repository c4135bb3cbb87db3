"""Log-probabilities of texts by decoders, and by encoders as pseudo-log-likelihoods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, fsum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megahead.errors import CheckpointError, DataError
from megahead.hf.published import (
    context_length,
    is_encoder,
    load_causal,
    load_masked,
    load_tokenizer_folder,
    read_context_length,
)

# Log-probabilities of tokens, for many rows at once, without computing anything twice.
#
# Rows are batched by length, so that little is padding. The head, most of a small model's work, is applied only to
# outputs that predict a wanted token. In a decoder, rows with the same prefix share one output, as minimal pairs do.
#
# B rows, T tokens, P predictions, O distinct outputs from which they are made, V vocabulary.

_TOKENS, _LOGITS = 1 << 13, 1 << 22  # of a batch on a CPU: 16 MB of logits, which stay in its caches
_ON_GPU = 32  # on a GPU, this many times larger batches, to keep it busy
_AT_ONCE = 16  # outputs per call of logsumexp


class Row(NamedTuple):
    """Tokens that a model reads, and at some places the targets whose probability is wanted."""

    ids: tuple[int, ...]
    places: tuple[int, ...]
    targets: tuple[int, ...]


class TokenPredictor:
    """Computes log-probabilities with a Hugging Face language model; `causal`: a token attends only to earlier ones."""

    def __init__(self, model: Any, *, causal: bool, batch_size: int | None = None) -> None:
        """batch_size: rows at once; None: as many as 8,192 tokens and 4 million logits allow (a GPU: 32 times that)."""
        self._model, self._causal, self._batch_size = model, causal, batch_size

    def log_probabilities(self, rows: Sequence[Row]) -> list[float]:
        """For each row the sum over its targets, in nats. Equal rows get equal numbers: each is computed once."""
        found: dict[Row, float] = {}
        for batch in self._batches(sorted(set(rows), key=lambda row: (len(row.ids), row))):
            found.update(zip(batch, self._sums(batch).tolist(), strict=True))
        return [found[row] for row in rows]

    def _batches(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """`rows`, by length, cut before a batch grows beyond its limits."""
        times = _ON_GPU if self._model.device.type == "cuda" else 1
        tokens, most_outputs = times * _TOKENS, times * _LOGITS // self._model.config.vocab_size
        start, outputs = 0, set[Hashable]()
        for end, row in enumerate(rows):
            size, mine = end - start + 1, set(self._outputs(row))
            outputs |= mine
            large = size * len(row.ids) > tokens or len(outputs) > most_outputs
            if end > start and (large if self._batch_size is None else size > self._batch_size):
                yield rows[start:end]
                start, outputs = end, mine
        if rows:
            yield rows[start:]

    def _outputs(self, row: Row) -> list[Hashable]:
        """For each of its places a key: equal keys mean equal outputs."""
        return [row.ids[: place + 1] if self._causal else (row.ids, place) for place in row.places]

    @torch.inference_mode()
    def _sums(self, rows: Sequence[Row]) -> Tensor:
        """[B], fp64."""
        longest, device = max(len(row.ids) for row in rows), self._model.device
        ids_BT = torch.tensor([row.ids + (0,) * (longest - len(row.ids)) for row in rows], device=device)
        lengths_B = torch.tensor([len(row.ids) for row in rows], device=device)
        made: dict[Hashable, tuple[int, int, int]] = {}  # an output's number, row and place
        wanted = []
        for k, row in enumerate(rows):
            for output, place, target in zip(self._outputs(row), row.places, row.targets, strict=True):
                wanted.append((k, made.setdefault(output, (len(made), k, place))[0], target))
        row_P, output_P, target_P = torch.tensor(wanted, device=device).view(-1, 3).unbind(-1)
        _, row_O, place_O = torch.tensor(list(made.values()), device=device).view(-1, 3).unbind(-1)
        logits_OV = self._logits(ids_BT, lengths_B, row_O, place_O)
        total_O = torch.cat([part.float().logsumexp(-1) for part in logits_OV.split(_AT_ONCE)])
        log_p_P = logits_OV[output_P, target_P].float() - total_O[output_P]
        return torch.zeros(len(rows), dtype=torch.float64, device=device).index_add_(0, row_P, log_p_P.double())

    def _logits(self, ids_BT: Tensor, lengths_B: Tensor, row_O: Tensor, place_O: Tensor) -> Tensor:
        """[O, V]: logits; the head is applied only to the body's outputs at those places."""

        def keep(_: Any, __: Any, outputs: Any) -> Any:
            outputs.last_hidden_state = outputs.last_hidden_state[row_O, place_O][None]
            return outputs

        options: dict[str, Any] = {"use_cache": False} if self._causal else {}
        if not self._causal:  # a causal model needs no mask: padding comes last, and nothing attends to later tokens
            options["attention_mask"] = torch.arange(ids_BT.shape[1], device=ids_BT.device) < lengths_B[:, None]
        hook = self._model.base_model.register_forward_hook(keep)
        try:
            logits_1OV: Tensor = self._model(input_ids=ids_BT, **options).logits
        finally:
            hook.remove()
        return logits_1OV[0]


# Log-probabilities of whole texts, by a decoder, or by an encoder as pseudo-log-likelihoods (each token masked in
# turn).


class LanguageModel(ABC):
    """A Hugging Face model with its tokenizer that gives texts a probability: in fp32, on a GPU if there is one."""

    def __init__(self, folder: Path, batch_size: int | None, *, causal: bool) -> None:
        self.tokenizer = load_tokenizer_folder(folder)
        self.model = (load_causal if causal else load_masked)(folder)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.predictor = TokenPredictor(self.model, causal=causal, batch_size=batch_size)

    def log_probabilities(self, texts: Sequence[str]) -> list[float]:
        """Of each text, in nats: the sum over its tokens."""
        rows = self.rows_of(texts)
        found = iter(self.predictor.log_probabilities([row for its in rows for row in its]))
        return [sum(next(found) for _ in its) for its in rows]

    @abstractmethod
    def rows_of(self, texts: Sequence[str]) -> list[list[Row]]:
        """Of each text the rows in which its tokens are predicted, each token in one."""


def open_language_model(folder: Path, batch_size: int | None = None) -> LanguageModel:
    """The model in `folder`; CheckpointError if it lacks a head or a tokenizer.

    batch_size: rows of tokens at once; None: `TokenPredictor` chooses.
    """
    return (Encoder if is_encoder(folder) else Decoder)(folder, batch_size)


class Decoder(LanguageModel):
    """Predicts each token of a text from those before it, within the model's context; the first from an end token."""

    def __init__(self, folder: Path, batch_size: int | None) -> None:
        super().__init__(folder, batch_size, causal=True)

    def rows_of(self, texts: Sequence[str]) -> list[list[Row]]:
        """As in lm-eval, a text longer than the context is read in windows."""
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [list(self._windows(ids)) for ids in encoded]

    def _windows(self, ids: Sequence[int]) -> Iterator[Row]:
        """Windows of a text; the last one begins early enough to fill the context."""
        tokens, context = (start_token_id(self.tokenizer), *ids), context_length(self.model)
        for start, end in pairwise([*range(0, len(ids), context), len(ids)]):
            begin = max(0, end - context)
            yield Row(tokens[begin:end], tuple(range(start - begin, end - begin)), tokens[start + 1 : end + 1])


class Encoder(LanguageModel):
    """Predicts each token of a text from all others, except those that follow in its own word (Kauf & Ivanova 2023,
    arXiv 2305.10588): otherwise the tokens of a long word give each other away, and rare words count as likely.

    CheckpointError if its tokenizer lacks [CLS], [SEP] or [MASK].
    """

    def __init__(self, folder: Path, batch_size: int | None = None) -> None:
        super().__init__(folder, batch_size, causal=False)
        self._start, self._end, self._mask = special_ids(self.tokenizer)

    def rows_of(self, texts: Sequence[str]) -> list[list[Row]]:
        """DataError for a text longer than the context."""
        rows, context = self.masked_rows(texts, whole_words=True), context_length(self.model)
        for text, its in zip(texts, rows, strict=True):
            if len(its) + 2 > context:
                raise DataError(f"a text must have at most {context - 2} tokens, but has {len(its)}: {text[:40]!r}.")
        return rows

    def masked_rows(self, texts: Sequence[str], *, whole_words: bool, max_length: int | None = None) -> list[list[Row]]:
        """For each text one row per token, in which that token is masked; texts are cut at `max_length` tokens.

        whole_words: the tokens after it in the same word are masked too.
        """
        if not texts:
            return []
        kept = None if max_length is None else max_length - 2
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
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


def special_ids(tokenizer: Any) -> tuple[int, int, int]:
    """[CLS], [SEP] and [MASK] of an encoder's tokenizer; CheckpointError where it lacks one."""
    found = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
    if None in found:
        where = tokenizer.name_or_path
        raise CheckpointError(f"`{where}` must hold a tokenizer with [CLS], [SEP] and [MASK], but it lacks one.")
    return found


def start_token_id(tokenizer: Any) -> int:
    """What begins a document, else what ends the one before; CheckpointError where the tokenizer names neither."""
    named = [id_ for id_ in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id_ is not None]
    if not named:
        raise CheckpointError(
            f"`{tokenizer.name_or_path}` must hold a tokenizer that names a begin or end token, to begin a text with, "
            "but names neither; add one to its tokenizer_config.json."
        )
    return int(named[0])


# Pseudo-perplexity of an encoder (Salazar et al. 2020, arXiv 1910.14659): each token predicted from all others.


@dataclass(frozen=True)
class PseudoPerplexity:
    """How well the tokens of texts are predicted, each from the rest of its text."""

    tokens: int
    loss: float
    """Mean negative log-probability of a token in nats."""

    def perplexity(self) -> float:
        """exp(loss); not comparable with a decoder's, whose tokens see only what came before."""
        return exp(self.loss)


def pseudo_perplexity(
    model_dir: Path, texts: Sequence[str], *, max_length: int = 128, batch_size: int = 64
) -> PseudoPerplexity:
    """Scores every token of `texts` with the masked language model in `model_dir`; each text is cut at `max_length`
    tokens, and at the model's context.

    Cost: a forward pass over a text for each of its tokens. Raises CheckpointError for a folder without a masked
    language model or a tokenizer with [CLS], [SEP] and [MASK], DataError for texts without a token.
    """
    encoder = Encoder(model_dir, batch_size)
    max_length = min(max_length, read_context_length(model_dir) or max_length)
    rows = [row for its in encoder.masked_rows(texts, whole_words=False, max_length=max_length) for row in its]
    if not rows:
        raise DataError("The texts must hold tokens to predict, but hold none.")
    nats = encoder.predictor.log_probabilities(rows)
    return PseudoPerplexity(len(rows), -fsum(nats) / len(rows))
