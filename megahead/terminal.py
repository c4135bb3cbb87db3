"""Prints text and tables in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def terminal(**options: Any) -> Console:
    """A console without markup, since names, paths and samples may contain [brackets]. `options`: rich's."""
    return Console(**({"highlight": False, "markup": False} | options))
