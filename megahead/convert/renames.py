"""Renames of parameters between two naming schemes: one table, read in both directions."""

from __future__ import annotations

from collections.abc import Mapping


class Renames:
    """Pairs of module names, ours to theirs; `*` stands for a layer's number, and the leaf (`weight`) stays."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._theirs = dict(pairs)
        self._ours = {theirs: ours for ours, theirs in pairs.items()}
        if len(self._ours) != len(self._theirs):
            raise ValueError("two modules of ours have one name of theirs")

    def theirs(self, name: str) -> str | None:
        """Their name of our parameter, or None when the table does not know it."""
        return _translate(name, self._theirs)

    def ours(self, name: str) -> str | None:
        """Our name of their parameter, or None when the table does not know it."""
        return _translate(name, self._ours)


def _translate(name: str, table: Mapping[str, str]) -> str | None:
    *path, leaf = name.split(".")
    pattern = ".".join("*" if part.isdigit() else part for part in path)
    if pattern not in table:
        return None
    numbers = iter([part for part in path if part.isdigit()])
    module = [next(numbers) if part == "*" else part for part in table[pattern].split(".")]
    return ".".join([*module, leaf])
