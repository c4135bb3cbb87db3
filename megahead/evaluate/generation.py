"""Generates text: after a prompt by a decoder, by unmasking with an encoder."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from megahead.errors import FieldError
from megahead.evaluate.scoring import special_ids, start_token_id
from megahead.hf.loading import WordStreamer, context_length
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
    """Generates up to `max_tokens` tokens after `prompt`, until the end token; an empty prompt starts a document.
    `stream` receives the text word by word, as it is generated.

    A prompt longer than the model's context minus `max_tokens` is truncated on the left; `report` receives a sentence
    about it.
    """
    max_prompt_tokens = context_length(model) - max_tokens
    if max_prompt_tokens < 1:
        raise FieldError(
            "--max-new-tokens", f"be below the model's context ({max_prompt_tokens + max_tokens})", got=max_tokens
        )
    ids = _truncate_prompt(tokenizer(prompt, verbose=False)["input_ids"], max_prompt_tokens, report)
    ids = ids or [start_token_id(tokenizer)]
    inputs = torch.tensor([ids], device=model.device)
    options = {"max_new_tokens": max_tokens, "pad_token_id": tokenizer.pad_token_id, **sampling}
    if stream is not None:
        options["streamer"] = WordStreamer(tokenizer, stream)
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    full_text, prompt_text = (tokenizer.decode(part, skip_special_tokens=True) for part in (output[0], ids))
    text: str = full_text.removeprefix(prompt_text)  # with the space between, which SentencePiece drops at a start
    return text


def _truncate_prompt(ids: list[int], max_prompt_tokens: int, report: Callable[[str], object] | None) -> list[int]:
    """Returns the last `max_prompt_tokens` tokens of a prompt."""
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

    A prompt longer than the model's context minus these and [CLS], [SEP] is truncated on the left, and `report`
    receives a sentence about it. Random numbers are torch's, on the CPU.
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
    text: str = full_text.removeprefix(prompt_text)  # with the space between, where there is one
    if stream is not None:
        stream(text)  # its words come in no order
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
