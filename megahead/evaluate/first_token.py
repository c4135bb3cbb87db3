"""The token with which a decoder begins a text."""

from __future__ import annotations

from typing import Any

from megahead.errors import CheckpointError


def first_token(tokenizer: Any) -> int:
    """What begins a document, else what ends the one before; CheckpointError where the tokenizer names neither."""
    named = [id_ for id_ in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id_ is not None]
    if not named:
        raise CheckpointError(
            f"`{tokenizer.name_or_path}` must hold a tokenizer that names a begin or end token, to begin a text with, "
            "but names neither; add one to its tokenizer_config.json."
        )
    return int(named[0])
