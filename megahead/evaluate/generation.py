"""Generates text: after a prompt by a decoder, by unmasking with an encoder."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from megahead.errors import FieldError
from megahead.evaluate.scoring import special_ids, start_token_id
from megahead.hf.published import WordStreamer, context_length
from megahead.wording import pluralize


def generate_continuation(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_tokens: int,
    sampling: dict[str, Any],
    report: Callable[[str], object] | None = None,
    stream: Callable[[str], object] | None = None,
) -> str:
    """Up to `max_tokens` tokens that follow `prompt`, ended by the end token; an empty prompt begins a document.
    `stream` receives the text word by word, as it is written.

    A prompt longer than the model's context minus `max_tokens` is cut at its beginning; `report` receives a sentence
    about it.
    """
    room = context_length(model) - max_tokens
    if room < 1:
        raise FieldError("--max-new-tokens", f"be below the model's context ({room + max_tokens})", got=max_tokens)
    ids = _end_of(tokenizer(prompt, verbose=False)["input_ids"], room, report) or [start_token_id(tokenizer)]
    inputs = torch.tensor([ids], device=model.device)
    options = {"max_new_tokens": max_tokens, "pad_token_id": tokenizer.pad_token_id, **sampling}
    if stream is not None:
        options["streamer"] = WordStreamer(tokenizer, stream)
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (output[0], ids))
    text: str = whole.removeprefix(before)  # with the space between, which SentencePiece drops at the start of a text
    return text


def _end_of(ids: list[int], room: int, report: Callable[[str], object] | None) -> list[int]:
    """The last `room` tokens of a prompt."""
    cut = max(len(ids) - room, 0)
    if cut and report is not None:
        report(f"the prompt exceeds the context and lost its first {pluralize(cut, 'token')}")
    return ids[cut:]


def sampling_options(temperature: float, top_k: int, top_p: float) -> dict[str, Any]:
    """Options of transformers' `generate`; temperature 0 means greedy decoding."""
    if temperature != 0 and not 1e-4 <= temperature < inf:
        raise FieldError("--temperature", "be 0, or from 0.0001 on", got=temperature)
    if top_k < 0:
        raise FieldError("--top-k", "be at least 0 (0: all tokens)", got=top_k)
    if not 0 < top_p <= 1:
        raise FieldError("--top-p", "be above 0 and at most 1", got=top_p)
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}


# Text by an encoder: mask tokens after a prompt are replaced by tokens, some in each pass, in a random order.
#
# This is how masked diffusion is sampled (Sahoo et al. 2024, arXiv 2406.07524): the places of a pass are drawn evenly
# among those left masked, and their tokens from the model's predictions, each by itself. With one place a pass, at
# temperature 1 and without top-k or top-p, the text is drawn exactly from the model, special tokens left out; fewer
# passes take less time, and tokens of one pass do not depend on each other. An encoder that was trained with few masks
# can be sampled so, too, but has never seen so little of a text.
#
# T tokens of the row, M masked places, m of one pass, V vocabulary.


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
    """`max_tokens` tokens after `prompt`, drawn in so many passes through the model (None: one token in each).

    A prompt longer than the model's context minus these and [CLS], [SEP] is cut at its beginning, and `report`
    receives a sentence about it. Random numbers are torch's, on the CPU.
    """
    room = context_length(model) - max_tokens - 2
    if room < 0:
        raise FieldError(
            "--max-new-tokens", f"leave 2 of the model's context ({room + max_tokens + 2})", got=max_tokens
        )
    passes = max_tokens if passes is None else passes
    if not 1 <= passes <= max_tokens:
        raise FieldError("--passes", f"be 1 to --max-new-tokens ({max_tokens})", got=passes)
    start, end, mask = special_ids(tokenizer)
    read = _end_of(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"], room, report)
    row_T = torch.tensor([start, *read, *[mask] * max_tokens, end], device=model.device)
    first = 1 + len(read)
    places_M = first + torch.randperm(max_tokens)
    for places_m in places_M.to(model.device).tensor_split(passes):
        logits_mV = model(input_ids=row_T[None]).logits[0, places_m].float()
        row_T[places_m] = _drawn(logits_mV, tokenizer.all_special_ids, sampling)
    whole, before = (tokenizer.decode(ids) for ids in (row_T[1:-1], read))
    text: str = whole.removeprefix(before)  # with the space between, where there is one
    if stream is not None:
        stream(text)  # its words come in no order
    return text


def _drawn(logits_mV: Tensor, never: list[int], sampling: dict[str, Any]) -> Tensor:
    """int64 [m]: a token for each place; `sampling` as `sampling_options` makes it."""
    logits_mV[:, never] = -torch.inf
    if not sampling["do_sample"]:
        return logits_mV.argmax(-1)
    chances_mV, ids_mV = (logits_mV / sampling["temperature"]).softmax(-1).cpu().sort(descending=True)
    if sampling["top_k"]:
        chances_mV[:, sampling["top_k"] :] = 0
    chances_mV /= chances_mV.sum(-1, keepdim=True)
    before_mV = chances_mV.cumsum(-1) - chances_mV
    chances_mV[before_mV >= sampling["top_p"]] = 0
    drawn_m: Tensor = ids_mV.gather(1, torch.multinomial(chances_mV, 1))[:, 0]
    return drawn_m.to(logits_mV.device)
