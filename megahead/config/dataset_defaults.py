"""Defaults for a config from the metadata of its training datasets (`PREFIX.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from megahead.config.base import require
from megahead.errors import FieldError
from megahead.remote_files import RemoteError, Store, is_remote, join_url, redact_secrets, split_url

FORMAT = "megahead-dataset/1"
"""Value of `format` in `PREFIX.json`."""

_SETTINGS = (("model", "vocab_size"), ("data", "end_token"), ("data", "tokenizer"))
"""(section, field) of the settings with such a default."""


def with_dataset_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in `tree` with missing ones of `_SETTINGS` filled in, as far as the training datasets have them.

    ConfigError if the datasets of a blend differ; RemoteError if vocab_size is missing and a store cannot be read.
    Reads no files if nothing is missing.
    """
    if not all(isinstance(tree.get(section), dict) for section in ("model", "data")):
        return dict(tree)
    filled = {section: dict(tree[section]) for section in ("model", "data")}
    missing = [(section, field) for section, field in _SETTINGS if field not in filled[section]]
    required = ("model", "vocab_size") in missing
    metadata = {prefix: _metadata(prefix, required=required) for prefix in _prefixes(filled["data"])} if missing else {}
    for section, field in missing:
        values = {prefix: info[field] for prefix, info in metadata.items() if info.get(field) is not None}
        if values:
            filled[section][field] = _common_value(f"{section}.{field}", values)
    return {**tree, **filled}


def missing_dataset_note(tree: Mapping[str, Any]) -> str:
    """Part of an error message: why the training datasets have no default; empty if `data.train` is missing."""
    data = tree.get("data")
    for prefix in _prefixes(data) if isinstance(data, Mapping) else ():
        if not _metadata(prefix, required=False):
            exists = is_remote(prefix) or any(Path(f"{prefix}{suffix}").exists() for suffix in (".idx", ".json"))
            reason = f"{prefix}.json does not say it" if exists else f"there is no dataset {prefix}"
            return f", and {redact_secrets(reason)}"
    return ""


def _prefixes(data: Mapping[str, Any]) -> list[str]:
    train = data.get("train")
    parts = train if isinstance(train, list) else [{"prefix": train}]
    return [
        part["prefix"]
        for part in parts
        if isinstance(part, dict) and part.get("prefix") and isinstance(part["prefix"], str)
    ]


def _common_value(setting: str, values: Mapping[str, Any]) -> Any:
    """The value of all datasets, by prefix; the first one of tokenizers, which are compared when a run starts."""
    (first, value), *others = values.items()
    for prefix, other in others if setting != "data.tokenizer" else ():
        got, hint = f"{value} in {first} and {other} in {prefix}", "cut their text with one tokenizer"
        require(other == value, "data.train", f"have one {setting} in all datasets", got=got, hint=hint)
    return value


def _metadata(prefix: str, *, required: bool) -> dict[str, Any]:
    """Defaults from a dataset's `PREFIX.json`; empty if it is missing or in another format. `required`: RemoteError if
    a store cannot be read."""
    folder, name = split_url(prefix) if is_remote(prefix) else (Path(prefix).parent, Path(prefix).name)
    try:
        content = orjson.loads(_read(folder, f"{name}.json"))
        if content["format"] != FORMAT:
            return {}
        tokenizer = content.get("tokenizer_file")
        tokenizer_path = None if tokenizer is None else _find(folder, tokenizer)
    except (OSError, ValueError, KeyError, TypeError):  # reported when a run opens the dataset
        return {}
    except FieldError:  # a URL with a password, reported with other mistakes in settings
        return {}
    except RemoteError:
        if required:
            raise
        return {}
    return {"vocab_size": content.get("vocab_size"), "end_token": content.get("end_token"), "tokenizer": tokenizer_path}


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
