"""Names of checkpoints as commands take them: a folder, or a URL that is fetched."""

from __future__ import annotations

from pathlib import Path

from megahead.errors import existing
from megahead.remote_files import is_far


def far_or_existing(text: str) -> Path:
    """argparse's `type` for a model or checkpoint: a path that exists, or a URL, whose newest sound checkpoint is
    fetched to this machine's cache, with its tokenizer and log. UserError where there is none."""
    if not is_far(text):
        return existing(text)
    from megahead.checkpoints.fetch import fetch_to_cache  # needs torch

    return fetch_to_cache(text)
