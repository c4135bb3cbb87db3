"""Prints text and tables in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def terminal(**options: Any) -> Console:
    """A console that prints text as it is, since names, paths and samples may hold [brackets]; `options` are rich's."""
    return Console(**({"highlight": False, "markup": False} | options))
