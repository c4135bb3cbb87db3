"""Which records of the input become documents, and which of their fields is the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megahead.errors import FieldError

Condition = tuple[str, str]


class Unfit(Exception):
    """Says what is wrong with a record; the error sentence begins with the record's FILE:LINE."""


@dataclass(frozen=True)
class Selection:
    """Reads one record (a JSON object, a row of a table) as a document.

    Keys may be nested: `meta.pile_set_name` is the record's key of exactly that name or, if there is none, the key
    `pile_set_name` of its `meta`.
    """

    text_key: str = "text"

    keep: tuple[Condition, ...] = ()
    """(key, value) pairs: only records that have, for each key in them, one of its values. All records if empty."""

    drop: tuple[Condition, ...] = ()
    """(key, value) pairs: records that have any of these are left out."""

    def text(self, record: Any) -> str | None:
        """The document's text; None for a record that is not wanted. Raises Unfit for a record without text."""
        if (self.keep or self.drop) and not self._wanted(record):
            return None
        try:
            text = _at(record, self.text_key)
        except KeyError:
            raise Unfit(f"must have the key `{self.text_key}`, but has not; see --text-key") from None
        if not isinstance(text, str):
            raise Unfit(f"must have a string in `{self.text_key}`, but has {type(text).__name__} instead")
        return text

    def columns(self, names: Sequence[str]) -> list[str]:
        """The top-level columns of a table that must be read, of those in `names`. KeyError for a missing one."""
        wanted = [self.text_key, *(key for key, _ in self.keep + self.drop)]
        found = {key: key if key in names else key.split(".")[0] for key in wanted}
        for key, column in found.items():
            if column not in names:
                raise KeyError(key)
        return list(dict.fromkeys(found.values()))

    def _wanted(self, record: Any) -> bool:
        asked: dict[str, set[str]] = {}
        for key, value in self.keep:
            asked.setdefault(key, set()).add(value)
        kept = all(_value(record, key) in values for key, values in asked.items())
        return kept and not any(_value(record, key) == value for key, value in self.drop)


def conditions(field: str, given: Sequence[str]) -> tuple[Condition, ...]:
    """`KEY=VALUE` texts as pairs; FieldError for one without `=`."""
    for text in given:
        if "=" not in text:
            raise FieldError(field, "be KEY=VALUE, like meta.pile_set_name=ArXiv", got=text)
    return tuple((key, value) for key, _, value in (text.partition("=") for text in given))


def _value(record: Any, key: str) -> str | None:
    """The value of `key`, as text; None if there is none (so a filter never fails)."""
    try:
        return str(_at(record, key))
    except KeyError:
        return None


def _at(record: Any, key: str) -> Any:
    """The value under a key or a path of keys. KeyError where there is none."""
    if not isinstance(record, Mapping):
        raise KeyError(key)
    if key in record:
        return record[key]
    head, dot, rest = key.partition(".")
    if not dot or head not in record:
        raise KeyError(key)
    return _at(record[head], rest)
