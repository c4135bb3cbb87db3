"""Renames of parameters between two naming schemes: one table, read in both directions."""

from __future__ import annotations

from collections.abc import Mapping


class Renames:
    """Pairs of names of modules, whose leaves (`weight`) stay as they are, or of single parameters; ours to theirs.

    `*` stands for a layer's number.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._theirs = dict(pairs)
        self._ours = {theirs: ours for ours, theirs in pairs.items()}
        if len(self._ours) != len(self._theirs):
            raise ValueError("two names of ours are one name of theirs")

    def theirs(self, name: str) -> str | None:
        """Their name of our parameter, or None when the table does not know it."""
        return _translate(name, self._theirs)

    def ours(self, name: str) -> str | None:
        """Our name of their parameter, or None when the table does not know it."""
        return _translate(name, self._ours)


def _translate(name: str, table: Mapping[str, str]) -> str | None:
    parts = name.split(".")
    pattern = ["*" if part.isdigit() else part for part in parts]
    known = next((n for n in (len(parts), len(parts) - 1) if ".".join(pattern[:n]) in table), None)
    if known is None:
        return None
    numbers = iter([part for part in parts if part.isdigit()])
    found = [next(numbers) if part == "*" else part for part in table[".".join(pattern[:known])].split(".")]
    return ".".join([*found, *parts[known:]])
