"""Generates text after a prompt."""

from __future__ import annotations

from math import inf
from typing import Any

from megahead.convert import context_of
from megahead.errors import FieldError
from megahead.evaluate.first_token import first_token


def continuation(model: Any, tokenizer: Any, prompt: str, max_tokens: int, sampling: dict[str, Any]) -> str:
    """Up to `max_tokens` tokens that follow `prompt`, ended by the end token; an empty prompt begins a document.

    A prompt longer than the model's context minus `max_tokens` is cut at its beginning.
    """
    import torch

    room = context_of(model) - max_tokens
    if room < 1:
        raise FieldError("--max-tokens", f"be below the model's context ({room + max_tokens})", got=max_tokens)
    ids = tokenizer(prompt, verbose=False)["input_ids"][-room:] or [first_token(tokenizer)]
    inputs = torch.tensor([ids], device=model.device)
    options = {"max_new_tokens": max_tokens, "pad_token_id": tokenizer.pad_token_id, **sampling}
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (output[0], ids))
    text: str = whole.removeprefix(before)  # with the space between, which SentencePiece drops at the start of a text
    return text


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
