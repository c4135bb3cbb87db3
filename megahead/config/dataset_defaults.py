"""What training datasets say of themselves (`PREFIX.json`), taken where a config leaves it out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from megahead.config.base import require
from megahead.errors import FieldError
from megahead.remote_files import RemoteError, Store, is_remote, join_url, redact_secrets, split_url

FORMAT = "megahead-dataset/1"
"""Of `PREFIX.json`."""

_TAKEN = (("model", "vocab_size"), ("data", "end_token"), ("data", "tokenizer"))
"""Settings that default to what the datasets say."""


def with_dataset_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with those of `_TAKEN` that they lack, as far as the training datasets are there and say them.

    ConfigError where the parts of a blend differ; RemoteError where a store must be read and cannot be. Reads nothing
    where all are given.
    """
    if not all(isinstance(tree.get(section), dict) for section in ("model", "data")):
        return dict(tree)
    filled = {section: dict(tree[section]) for section in ("model", "data")}
    missing = [(section, field) for section, field in _TAKEN if field not in filled[section]]
    needed = ("model", "vocab_size") in missing
    facts = {prefix: _facts(prefix, needed=needed) for prefix in _prefixes(filled["data"])} if missing else {}
    for section, field in missing:
        values = {prefix: each[field] for prefix, each in facts.items() if each.get(field) is not None}
        if values:
            filled[section][field] = _one(f"{section}.{field}", values)
    return {**tree, **filled}


def missing_dataset_note(tree: Mapping[str, Any]) -> str:
    """Why the training datasets do not say what the settings leave out, after a comma; empty if none is named."""
    data = tree.get("data")
    for prefix in _prefixes(data) if isinstance(data, Mapping) else ():
        if not _facts(prefix, needed=False):
            there = is_remote(prefix) or any(Path(f"{prefix}{ending}").exists() for ending in (".idx", ".json"))
            why = f"{prefix}.json does not say it" if there else f"there is no dataset {prefix}"
            return f", and {redact_secrets(why)}"
    return ""


def _prefixes(data: Mapping[str, Any]) -> list[str]:
    train = data.get("train")
    parts = train if isinstance(train, list) else [{"prefix": train}]
    return [
        part["prefix"]
        for part in parts
        if isinstance(part, dict) and part.get("prefix") and isinstance(part["prefix"], str)
    ]


def _one(name: str, values: Mapping[str, Any]) -> Any:
    """That of all datasets; of tokenizers, whose content is compared when a run begins, the first."""
    (first, value), *others = values.items()
    for prefix, other in others if name != "data.tokenizer" else ():
        got, hint = f"{value} in {first} and {other} in {prefix}", "cut their text with one tokenizer"
        require(other == value, "data.train", f"have one {name} in all datasets", got=got, hint=hint)
    return value


def _facts(prefix: str, *, needed: bool) -> dict[str, Any]:
    """Those of a dataset; none where it is missing or of another program. `needed`: a store must answer."""
    folder, name = split_url(prefix) if is_remote(prefix) else (Path(prefix).parent, Path(prefix).name)
    try:
        described = orjson.loads(_read(folder, f"{name}.json"))
        if described["format"] != FORMAT:
            return {}
        tokenizer = described.get("tokenizer_file")
        there = None if tokenizer is None else _find(folder, tokenizer)
    except (OSError, ValueError, KeyError, TypeError):  # what is wrong with it is said when a run opens it
        return {}
    except FieldError:  # a URL with a password, which the settings' checks report beside other mistakes
        return {}
    except RemoteError:
        if needed:
            raise
        return {}
    return {"vocab_size": described.get("vocab_size"), "end_token": described.get("end_token"), "tokenizer": there}


def _read(folder: str | Path, name: str) -> bytes:
    return (folder / name).read_bytes() if isinstance(folder, Path) else Store(folder).read(name)


def _find(folder: str | Path, name: str) -> str | None:
    """The path or URL of a file; None if it is missing."""
    if isinstance(folder, Path):
        return str(folder / name) if (folder / name).is_file() else None
    try:
        Store(folder).size(name)
    except FileNotFoundError:
        return None
    return join_url(folder, name)
