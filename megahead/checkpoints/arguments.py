"""Command-line arguments that are checkpoints: a path, or a URL that is fetched."""

from __future__ import annotations

import re
from pathlib import Path

from megahead.errors import existing_path
from megahead.remote_files import is_remote


def checkpoint_path(text: str) -> Path:
    """argparse's `type` for a model or checkpoint: an existing path, CHECKPOINTS/step-N or CHECKPOINTS/N for the newest
    one of a step, or a URL, whose newest valid checkpoint is fetched to this machine's cache, with its tokenizer and
    log. UserError if there is none."""
    if not is_remote(text):
        path = Path(text)
        if re.fullmatch(r"(step-)?\d+", path.name) and not path.exists() and path.parent.is_dir():
            from megahead.checkpoints.disk import find_checkpoint  # needs torch

            return find_checkpoint(path) or existing_path(text)
        return existing_path(text)
    from megahead.checkpoints.fetch import fetch_to_cache  # needs torch

    return fetch_to_cache(text)
