"""Renames of parameters between naming schemes, one table for both directions; the parts of encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megahead.errors import FieldError

# Renames of parameters between two naming schemes: one table, read in both directions.


class Renames:
    """Pairs of names of modules, whose leaves (`weight`) stay as they are, or of single parameters; ours to theirs.

    `*` stands for a layer's number. Where theirs holds several of ours, one below the other, ours are a tuple.
    """

    def __init__(self, pairs: Mapping[str | tuple[str, ...], str]) -> None:
        held = {theirs: (ours,) if isinstance(ours, str) else ours for ours, theirs in pairs.items()}
        if len(held) != len(pairs):
            raise ValueError("two names of ours are one name of theirs")
        self._ours = held
        self._theirs = {ours: (theirs,) for theirs, several in held.items() for ours in several}

    def theirs(self, name: str) -> str | None:
        """Their name of our parameter, or None when the table does not know it."""
        return next(iter(_translate(name, self._theirs)), None)

    def ours(self, name: str) -> tuple[str, ...]:
        """Our names of what their parameter holds, from its first row on; none when the table does not know it."""
        return _translate(name, self._ours)


def _translate(name: str, table: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    parts = name.split(".")
    pattern = ["*" if part.isdigit() else part for part in parts]
    known = next((n for n in (len(parts), len(parts) - 1) if ".".join(pattern[:n]) in table), None)
    if known is None:
        return ()
    numbers = [part for part in parts if part.isdigit()]
    return tuple(".".join([*_numbered(found, numbers), *parts[known:]]) for found in table[".".join(pattern[:known])])


def _numbered(pattern: str, numbers: list[str]) -> list[str]:
    remaining = iter(numbers)
    return [next(remaining) if part == "*" else part for part in pattern.split(".")]


# What Hugging Face calls the parts of an encoder, with its head or alone.


@dataclass(frozen=True)
class EncoderNames:
    """Parameter names of one kind of model: with a head, or alone and without `prefix`."""

    kind: str
    """For people."""

    prefix: str
    """Begins the backbone's names in a model with a head."""

    table: Renames
    ignored: tuple[str, ...]
    """Parts of names of what is no parameter of ours: poolers, buffers, the head's copy of a tied weight."""

    heads: tuple[str, ...]
    """What the head's names begin with."""

    def ours(self, theirs: str) -> tuple[str, ...]:
        """Our names of what a stored tensor of theirs holds, in a model with a head or without; none for what we leave
        out.

        Raises FieldError for a name that this kind of model does not have.
        """
        if any(part in theirs for part in self.ignored):
            return ()
        name = theirs.replace(".gamma", ".weight").replace(".beta", ".bias")  # as TensorFlow called them
        if not name.startswith((self.prefix, *self.heads)):
            name = self.prefix + name
        ours = self.table.ours(name)
        if not ours:
            raise FieldError("model", f"hold tensors of a {self.kind} model only", got=f"one that has {theirs}")
        return ours
