"""Errors of far storage, each one sentence, in which no credentials are repeated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from megahead.errors import UserError
from megahead.far.address import without_secrets

_NAME_OF_SECRET = re.compile(r"key|secret|token|passw|credential|signature|sas", re.IGNORECASE)
_SHORTEST_SECRET = 6


class FarError(UserError):
    """A store that cannot be reached, does not answer, or refuses."""


class DamagedError(UserError):
    """A far file that is missing, or not what was recorded of it."""


def told(error: BaseException) -> str:
    """The first line of what a store's package says, but for passwords and queries of addresses, and known secrets."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    for secret in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***")
    return re.sub(r"\?\S+", "?***", without_secrets(text))[:300].rstrip(".")


def _secrets() -> Iterator[str]:
    """What must not be repeated: of the environment, and of fsspec's settings."""
    import fsspec

    given: list[tuple[str, Any]] = [*os.environ.items()]
    given += [pair for section in fsspec.config.conf.values() if isinstance(section, dict) for pair in section.items()]
    for name, value in given:
        if isinstance(value, str) and len(value) >= _SHORTEST_SECRET and _NAME_OF_SECRET.search(name):
            yield value
