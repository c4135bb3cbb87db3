"""Addresses of far files: what is one, and that none carries a secret."""

from __future__ import annotations

import posixpath
import re

from megahead.errors import FieldError

_SCHEME = re.compile(r"([A-Za-z0-9]+::)*[A-Za-z][A-Za-z0-9+.-]*://")
_NAMES = "(?:key|token|secret|password|passwd|credential|signature|sig)"
_SECRET = re.compile(rf"://[^@]*:[^@]*@|\?|{_NAMES}=", re.IGNORECASE)
"""A password before a host (it may hold slashes), a query (signed addresses have one), a named secret."""


def is_far(name: str) -> bool:
    """Whether `name` is a URL and not a path."""
    return _SCHEME.match(name) is not None


def trimmed(url: str) -> str:
    """Without slashes at its end, but for those of a root (`file:///`)."""
    return re.sub(r"(?<![:/])/+$", "", url)


def parted(url: str) -> tuple[str, str]:
    """The address of a file's folder, and its name there."""
    folder, _, name = url.rpartition("/")
    return f"{folder}/" if folder.endswith("/") else folder, name


def joined(url: str, *names: str) -> str:
    """The address of a file below `url`."""
    return "/".join([trimmed(url), *names])


def is_below(url: str, folder: str) -> bool:
    """Whether `url` is of something in the folder at another URL, or that folder itself."""
    return f"{_spelled(url)}/".startswith(f"{_spelled(folder)}/")


def _spelled(url: str) -> str:
    """The same for all ways to write the address of a place on a disk; other stores may take each for another place."""
    scheme, _, path = url.partition("://")
    if scheme.lower() in ("file", "local"):
        url = f"file://{posixpath.normpath(re.sub('/+', '/', path))}"
    return url.rstrip("/")


def refuse_secrets(field: str, name: str) -> None:
    """FieldError for a URL with a password, a key or a query; the sentence does not repeat it."""
    if is_far(name) and _SECRET.search(name):
        hint = "give credentials by the environment, as the store's own tools read them"
        raise FieldError(field, "be an address without password, key or query", got="one that has some", hint=hint)


def without_secrets(text: str) -> str:
    """A text that may repeat what a user gave, without what `refuse_secrets` would refuse in it."""
    text = re.sub(r"://[^\s@'\"]*:[^\s@'\"]*@", "://***@", text)
    text = re.sub(r"(://[^\s'\"?]*)\?[^\s'\"]*", r"\1?***", text)
    return re.sub(rf"(://[^\s'\"]*?{_NAMES}=)[^\s'\"&;]*", r"\1***", text, flags=re.IGNORECASE)
