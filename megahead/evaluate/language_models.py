"""Log-probabilities of texts by decoders, and by encoders as pseudo-log-likelihoods; and texts that they generate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import exp, fsum, inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megahead.errors import CheckpointError, DataError, FieldError
from megahead.hf.loading import (
    WordStreamer,
    context_length,
    is_encoder,
    load_causal,
    load_masked,
    load_tokenizer_folder,
    logits_at,
    read_context_length,
)
from megahead.wording import pluralize

# Log-probabilities of tokens, for many rows at once, with each distinct output computed once.
#
# Rows are batched by length, so that little is padding. The head, most of a small model's work, is applied only to
# outputs that predict a target. In a decoder, rows with the same prefix (minimal pairs) share its outputs.
#
# B rows, T tokens, P predictions, O distinct outputs from which they are made (o: at once), V vocabulary.

_MAX_BATCH_TOKENS = 1 << 13  # on a CPU
_MAX_BATCH_LOGITS = 1 << 22  # on a CPU: 16 MB, which stay in its caches
_GPU_BATCH_FACTOR = 32  # on a GPU, this many times larger batches, to keep it busy
_LOGSUMEXP_ROWS = 16  # outputs per call of logsumexp


class ScoredRow(NamedTuple):
    """Input tokens, and the targets that are predicted at some positions."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    targets: tuple[int, ...]


class LanguageModel(ABC):
    """A Hugging Face model with its tokenizer that scores texts: in fp32, on a GPU if there is one."""

    causal: ClassVar[bool]
    """Whether a token attends only to earlier ones."""

    def __init__(self, folder: Path, batch_size: int | None = None) -> None:
        """batch_size: rows at once; None: as many as 8,192 tokens and 4 million logits allow (a GPU: 32 times that).
        Of a longer row the head is applied to a part at a time."""
        self.tokenizer = load_tokenizer_folder(folder)
        self.model = (load_causal if self.causal else load_masked)(folder)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._batch_size = batch_size
        factor = _GPU_BATCH_FACTOR if self.model.device.type == "cuda" else 1
        self._max_tokens = factor * _MAX_BATCH_TOKENS
        self._max_outputs = max(1, factor * _MAX_BATCH_LOGITS // self.model.config.vocab_size)

    @abstractmethod
    def build_rows(self, texts: Sequence[str]) -> list[list[ScoredRow]]:
        """Returns the rows of each text; each of its tokens is predicted in exactly one."""

    def log_probabilities(self, texts: Sequence[str]) -> list[float]:
        """Returns the sum over its tokens, in nats, for each text."""
        rows = self.build_rows(texts)
        sums = iter(self.row_log_probabilities([row for text_rows in rows for row in text_rows]))
        return [sum(next(sums) for _ in text_rows) for text_rows in rows]

    def row_log_probabilities(self, rows: Sequence[ScoredRow]) -> list[float]:
        """Returns the sum over its targets, in nats, for each row. Equal rows are computed once."""
        sums: dict[ScoredRow, float] = {}
        for batch in self._batches(sorted(set(rows), key=lambda row: (len(row.ids), row))):
            sums.update(zip(batch, self._sums(batch).tolist(), strict=True))
        return [sums[row] for row in rows]

    def _batches(self, rows: Sequence[ScoredRow]) -> Iterator[Sequence[ScoredRow]]:
        start, keys = 0, set[Hashable]()
        for end, row in enumerate(rows):
            size, row_keys = end - start + 1, set(self._output_keys(row))
            keys |= row_keys
            exceeds_limits = size * len(row.ids) > self._max_tokens or len(keys) > self._max_outputs
            if end > start and (exceeds_limits if self._batch_size is None else size > self._batch_size):
                yield rows[start:end]
                start, keys = end, row_keys
        if rows:
            yield rows[start:]

    def _output_keys(self, row: ScoredRow) -> list[Hashable]:
        """Returns a key for each position of a row: equal keys mean equal outputs."""
        return [row.ids[: position + 1] if self.causal else (row.ids, position) for position in row.positions]

    @torch.inference_mode()
    def _sums(self, rows: Sequence[ScoredRow]) -> Tensor:
        """[B], fp64: sums of log-probabilities."""
        longest, device = max(len(row.ids) for row in rows), self.model.device
        ids_BT = torch.tensor([row.ids + (0,) * (longest - len(row.ids)) for row in rows], device=device)
        lengths_B = torch.tensor([len(row.ids) for row in rows], device=device)
        outputs: dict[Hashable, tuple[int, int, int]] = {}  # an output's index, row and position
        predictions = []
        for i, row in enumerate(rows):
            for key, position, target in zip(self._output_keys(row), row.positions, row.targets, strict=True):
                predictions.append((i, outputs.setdefault(key, (len(outputs), i, position))[0], target))
        row_P, output_P, target_P = torch.tensor(predictions, device=device).view(-1, 3).unbind(-1)
        _, row_O, position_O = torch.tensor(list(outputs.values()), device=device).view(-1, 3).unbind(-1)
        log_p_P = torch.empty(len(predictions), dtype=torch.float64, device=device)
        inputs: dict[str, Any] = {"input_ids": ids_BT}
        if self.causal:  # it needs no mask: padding comes last, and nothing attends to later tokens
            inputs["use_cache"] = False
        else:
            inputs["attention_mask"] = torch.arange(longest, device=device) < lengths_B[:, None]
        first = 0
        for logits_oV in logits_at(self.model, row_O, position_O, self._max_outputs, **inputs):
            is_here_P = (output_P >= first) & (output_P < first + len(logits_oV))
            output_p, target_p = output_P[is_here_P] - first, target_P[is_here_P]
            total_o = torch.cat([part.float().logsumexp(-1) for part in logits_oV.split(_LOGSUMEXP_ROWS)])
            log_p_P[is_here_P] = (logits_oV[output_p, target_p].float() - total_o[output_p]).double()
            first += len(logits_oV)
        return torch.zeros(len(rows), dtype=torch.float64, device=device).index_add_(0, row_P, log_p_P)


# Log-probabilities of whole texts, by a decoder, or by an encoder as pseudo-log-likelihoods (each token masked in
# turn).


def open_language_model(folder: Path, batch_size: int | None = None) -> LanguageModel:
    """Loads the model in `folder`; CheckpointError if it lacks a head or a tokenizer.

    batch_size: as in `LanguageModel`.
    """
    return (Encoder if is_encoder(folder) else Decoder)(folder, batch_size)


class Decoder(LanguageModel):
    """Predicts each token of a text from those before it in the context; the first from bos or eos."""

    causal = True

    def build_rows(self, texts: Sequence[str]) -> list[list[ScoredRow]]:
        """Returns a row for each window of a text; as in lm-eval, windows are as long as the context, and the last one
        overlaps the one before to fill it."""
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        rows, context = list[list[ScoredRow]](), context_length(self.model)
        for ids in encoded:
            tokens = (start_token_id(self.tokenizer), *ids)
            rows.append([])
            for start, end in pairwise([*range(0, len(ids), context), len(ids)]):
                first = max(0, end - context)
                positions = tuple(range(start - first, end - first))
                rows[-1].append(ScoredRow(tokens[first:end], positions, tokens[start + 1 : end + 1]))
        return rows


class Encoder(LanguageModel):
    """Predicts each token of a text from all others, except those that follow in its own word (Kauf & Ivanova 2023,
    arXiv 2305.10588): otherwise the tokens of a long word reveal each other, and rare words count as likely.

    CheckpointError if its tokenizer lacks [CLS], [SEP] or [MASK].
    """

    causal = False

    def __init__(self, folder: Path, batch_size: int | None = None) -> None:
        super().__init__(folder, batch_size)
        self._start, self._end, self._mask = special_ids(self.tokenizer)

    def build_rows(self, texts: Sequence[str]) -> list[list[ScoredRow]]:
        """DataError for a text longer than the context."""
        rows, context = self.masked_rows(texts, whole_words=True), context_length(self.model)
        for text, text_rows in zip(texts, rows, strict=True):
            if len(text_rows) + 2 > context:
                raise DataError(
                    f"a text must have at most {context - 2} tokens, but has {len(text_rows)}: {text[:40]!r}."
                )
        return rows

    def masked_rows(
        self, texts: Sequence[str], *, whole_words: bool, max_length: int | None = None
    ) -> list[list[ScoredRow]]:
        """Returns for each text one row per token, in which that token is masked; texts are truncated to `max_length`
        tokens, [CLS] and [SEP] included.

        whole_words: later tokens of the same word are masked too.
        """
        if not texts:
            return []
        max_tokens = None if max_length is None else max_length - 2
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        rows = []
        for k, ids in enumerate(encoded["input_ids"]):
            words = _words(texts[k], encoded[k]) if whole_words else range(len(ids))
            rows.append(list(self._masked_rows(ids[:max_tokens], words[:max_tokens])))
        return rows

    def _masked_rows(self, ids: list[int], words: Sequence[Hashable]) -> Iterator[ScoredRow]:
        for position, token in enumerate(ids):
            end = position + 1
            while end < len(ids) and words[end] is not None and words[end] == words[position]:
                end += 1
            masked = [self._start, *ids[:position], *[self._mask] * (end - position), *ids[end:], self._end]
            yield ScoredRow(tuple(masked), (position + 1,), (token,))


def _words(text: str, encoding: Any) -> list[Hashable]:
    """Returns a key for each token, equal in one word; None for a special token. A space begins a word also where no
    pre-tokenizer splits there (Llama 2, Gemma 2)."""
    starts = [start for start, _ in encoding.offsets]  # equal for the bytes of a character
    num_spaces = accumulate(new != old and text[new : new + 1].isspace() for old, new in pairwise([-1, *starts]))
    return [None if word is None else (word, n) for word, n in zip(encoding.word_ids, num_spaces, strict=True)]


def special_ids(tokenizer: Any) -> tuple[int, int, int]:
    """Returns the ids of [CLS], [SEP] and [MASK] of an encoder's tokenizer; CheckpointError if it lacks one."""
    ids = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
    if None in ids:
        source = tokenizer.name_or_path
        raise CheckpointError(f"`{source}` must hold a tokenizer with [CLS], [SEP] and [MASK], but it lacks one.")
    return ids


def start_token_id(tokenizer: Any) -> int:
    """Returns the id of the bos token, else of the eos token; CheckpointError if the tokenizer has neither."""
    ids = [id_ for id_ in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id_ is not None]
    if not ids:
        raise CheckpointError(
            f"`{tokenizer.name_or_path}` must hold a tokenizer that names a begin or end token, to begin a text with, "
            "but names neither; add one to its tokenizer_config.json."
        )
    return int(ids[0])


# Pseudo-perplexity of an encoder (Salazar et al. 2020, arXiv 1910.14659): each token predicted from all others.


def pseudo_perplexity(
    model_dir: Path, texts: Sequence[str], *, max_length: int = 128, batch_size: int = 64
) -> tuple[int, float]:
    """(tokens, exp of their mean negative log-probability) by the masked language model in `model_dir`; each text is
    truncated to `max_length` tokens, and to the model's context. Not comparable with a decoder's perplexity, whose
    tokens see only what came before.

    Cost: a forward pass over a text for each of its tokens. Raises CheckpointError for a folder without a masked
    language model or a tokenizer with [CLS], [SEP] and [MASK], DataError for texts without a token.
    """
    encoder = Encoder(model_dir, batch_size)
    max_length = min(max_length, read_context_length(model_dir) or max_length)
    rows_by_text = encoder.masked_rows(texts, whole_words=False, max_length=max_length)
    rows = [row for text_rows in rows_by_text for row in text_rows]
    if not rows:
        raise DataError("The texts must hold tokens to predict, but hold none.")
    nats = encoder.row_log_probabilities(rows)
    return len(rows), exp(-fsum(nats) / len(rows))


# Text after a prompt, by a decoder.


def generate_continuation(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_tokens: int,
    sampling: dict[str, Any],
    report: Callable[[str], object] | None = None,
    stream: Callable[[str], object] | None = None,
) -> str:
    """Generates up to `max_tokens` tokens after `prompt`, until the end token; an empty prompt starts a document.
    `stream` receives the text word by word, as it is generated.

    What the tokenizer adds before a prompt stays, what it adds behind is left out. A prompt longer than the model's
    context minus `max_tokens` is truncated on the left, after its bos token; `report` receives a sentence about it.
    """
    max_prompt_tokens = context_length(model) - max_tokens
    if max_prompt_tokens < 1:
        raise FieldError(
            "--max-new-tokens", f"be below the model's context ({max_prompt_tokens + max_tokens})", got=max_tokens
        )
    encoded = tokenizer(prompt, return_special_tokens_mask=True, verbose=False)
    ids, is_added = encoded["input_ids"], encoded["special_tokens_mask"]
    ids = ids[: max((end for end, added in enumerate(is_added, 1) if not added), default=0)]
    num_bos = int(ids[:1] == [tokenizer.bos_token_id])
    ids = ids[:num_bos] + _truncate_prompt(ids[num_bos:], max_prompt_tokens - num_bos, report)
    ids = ids or [start_token_id(tokenizer)]
    inputs = torch.tensor([ids], device=model.device)
    options = {"max_new_tokens": max_tokens, "pad_token_id": tokenizer.pad_token_id, **sampling}
    if stream is not None:
        options["streamer"] = WordStreamer(tokenizer, stream)
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    full_text, prompt_text = (tokenizer.decode(part, skip_special_tokens=True) for part in (output[0], ids))
    text: str = full_text.removeprefix(prompt_text)  # keeps the space between, which SentencePiece drops at a start
    return text


def _truncate_prompt(ids: list[int], max_prompt_tokens: int, report: Callable[[str], object] | None) -> list[int]:
    num_cut = max(len(ids) - max_prompt_tokens, 0)
    if num_cut and report is not None:
        report(f"the prompt exceeds the context and lost its first {pluralize(num_cut, 'token')}")
    return ids[num_cut:]


def sampling_options(temperature: float, top_k: int, top_p: float) -> dict[str, Any]:
    """Returns options of transformers' `generate`; temperature 0 means greedy decoding."""
    if temperature != 0 and not 1e-4 <= temperature < inf:
        raise FieldError("--temperature", "be 0, or from 0.0001 on", got=temperature)
    if top_k < 0:
        raise FieldError("--top-k", "be at least 0 (0: all tokens)", got=top_k)
    if not 0 < top_p <= 1:
        raise FieldError("--top-p", "be above 0 and at most 1", got=top_p)
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}


# Text of an encoder: mask tokens after a prompt are replaced by tokens, some in each pass, in a random order.
#
# This is how masked diffusion is sampled (Sahoo et al. 2024, arXiv 2406.07524): the positions of a pass are uniformly
# random among the masked ones, and their tokens are independent samples from the model's predictions. With one position
# a pass, at temperature 1 and without top-k or top-p, the text is an exact sample of the model, except for special
# tokens; fewer passes take less time, but tokens of one pass are independent. An encoder that was trained with few
# masks can be sampled in this way too, but outside of its training distribution.
#
# T tokens of the row, M masked positions, m of one pass, V vocabulary.


@torch.inference_mode()
def generate_by_unmasking(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_tokens: int,
    sampling: dict[str, Any],
    passes: int | None = None,
    report: Callable[[str], object] | None = None,
    stream: Callable[[str], object] | None = None,
) -> str:
    """Generates `max_tokens` tokens after `prompt` in `passes` passes through the model (None: one token in each).

    A prompt longer than the context minus `max_tokens`, [CLS] and [SEP] is truncated on the left; `report` receives a
    sentence about it. Random numbers are torch's, on the CPU.
    """
    max_prompt_tokens = context_length(model) - max_tokens - 2
    if max_prompt_tokens < 0:
        raise FieldError(
            "--max-new-tokens", f"leave 2 of the model's context ({max_prompt_tokens + max_tokens + 2})", got=max_tokens
        )
    passes = max_tokens if passes is None else passes
    if not 1 <= passes <= max_tokens:
        raise FieldError("--passes", f"be 1 to --max-new-tokens ({max_tokens})", got=passes)
    cls_id, sep_id, mask_id = special_ids(tokenizer)
    encoded = tokenizer(prompt, add_special_tokens=False, verbose=False)
    prompt_ids = _truncate_prompt(encoded["input_ids"], max_prompt_tokens, report)
    row_T = torch.tensor([cls_id, *prompt_ids, *[mask_id] * max_tokens, sep_id], device=model.device)
    first = 1 + len(prompt_ids)
    positions_M = first + torch.randperm(max_tokens)
    for positions_m in positions_M.to(model.device).tensor_split(passes):
        logits_mV = model(input_ids=row_T[None]).logits[0, positions_m].float()
        row_T[positions_m] = _sample_tokens(logits_mV, tokenizer.all_special_ids, sampling)
    full_text, prompt_text = (tokenizer.decode(ids) for ids in (row_T[1:-1], prompt_ids))
    text: str = full_text.removeprefix(prompt_text)  # keeps the space between, if there is one
    if stream is not None:
        stream(text)  # at once: tokens are generated in random order
    return text


def _sample_tokens(logits_mV: Tensor, excluded_ids: list[int], sampling: dict[str, Any]) -> Tensor:
    """int64 [m]: a token for each position; `sampling` is the result of `sampling_options`."""
    logits_mV[:, excluded_ids] = -torch.inf
    if not sampling["do_sample"]:
        return logits_mV.argmax(-1)
    probs_mV, ids_mV = (logits_mV / sampling["temperature"]).softmax(-1).cpu().sort(descending=True)
    if sampling["top_k"]:
        probs_mV[:, sampling["top_k"] :] = 0
    probs_mV /= probs_mV.sum(-1, keepdim=True)
    cumulative_mV = probs_mV.cumsum(-1) - probs_mV
    probs_mV[cumulative_mV >= sampling["top_p"]] = 0
    tokens_m: Tensor = ids_mV.gather(1, torch.multinomial(probs_mV, 1))[:, 0]
    return tokens_m.to(logits_mV.device)
