"""The base class of all settings, classes loaded by their path, and the search for config files."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from megahead.errors import ConfigError, FieldError
from megahead.remote_files import refuse_secrets
from megahead.wording import did_you_mean

_SHELL_WORD = re.compile(r"^~(/|$)|\$\{?[A-Za-z_]")


class Settings(BaseModel):
    """A section of settings. Values derived from them are methods; they are never stored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_true_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses YAML's `on`, `yes` and `true` for a number, which would be 1."""
        is_true = any(item is True for item in (value if isinstance(value, list | tuple) else [value]))
        types = _types_within(cls.model_fields[str(info.field_name)].annotation) if is_true else []
        is_number = (int in types or float in types) and bool not in types
        require(not is_number, str(info.field_name), "be a number", got="true")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_unsafe_strings(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses strings with zero bytes, which would truncate a path; secrets, which would be saved with the
        settings; and strings that a shell would expand, since a folder named `~` or `$SCRATCH` would be made. The
        validation context `saved` (settings from a checkpoint, whose folders exist) allows the last. Within fields that
        take a dict only secrets are refused, and only in new settings."""
        field, saved = str(info.field_name), bool((info.context or {}).get("saved"))
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                if "\0" in text:
                    raise ConfigError(field, "have no zero byte", got=repr(text))
                if _SHELL_WORD.search(text) and not saved:
                    hint = "no shell expands settings; name the folder itself"
                    raise ConfigError(field, "be written out", got=repr(text), hint=hint)
                _refuse_secrets(field, text)
        if isinstance(value, dict) and not saved:
            takes_dict = any(get_origin(kind) is dict for kind in _types_within(cls.model_fields[field].annotation))
            for text in _strings_within(value) if takes_dict else ():  # a section validates its own fields
                _refuse_secrets(field, text)
        return value

    def changed(self, *fields: str) -> dict[str, Any]:
        """Returns {field: value} for the fields (default: all) that differ from their defaults; "given" for a
        section. The values are for error messages."""
        values = {name: getattr(self, name) for name in fields or type(self).model_fields}
        changed = {name: value for name, value in values.items() if value != type(self).model_fields[name].default}
        return {name: "given" if isinstance(value, Settings) else value for name, value in changed.items()}


def _types_within(annotation: Any) -> list[Any]:
    """A type and those in it, as of `int | None`."""
    return [annotation, *chain.from_iterable(map(_types_within, get_args(annotation)))]


def _refuse_secrets(field: str, text: str) -> None:
    try:
        refuse_secrets(field, text)
    except FieldError as error:
        raise ConfigError(error.field, error.rule, got=error.got, hint=error.hint) from None


def _strings_within(value: Any) -> Iterator[str]:
    """A string, or those in lists and dicts (keys included), at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        parts = chain(value, value.values() if isinstance(value, dict) else ())
        yield from chain.from_iterable(map(_strings_within, parts))


def require(condition: object, field: str, rule: str, *, got: Any, hint: str = "") -> None:
    """Raises a ConfigError (`field` must RULE, but is GOT) unless `condition` is true."""
    if not condition:
        raise ConfigError(field, rule, got=got, hint=hint)


def refuse(field: str, value: Any, why: str) -> None:
    """Raises a ConfigError (`field` must be left out WHY) if `value` is set."""
    require(not value, field, f"be left out {why}", got=value)


def unknown_setting_message(parents: Sequence[str], key: str, known: Sequence[str]) -> str:
    """The error message for an unknown `key` of the section at path `parents`, whose settings are `known`."""
    fix = did_you_mean(key, known, "".join(f"{parent}." for parent in parents)) or f"known here: {', '.join(known)}."
    return f"`{'.'.join([*parents, key])}` is not a setting; {fix}"


# User classes, given in a setting as `path/to/file.py:Class` or `package.module:Class`.


def require_class_path(field: str, class_path: str) -> str:
    """Returns `class_path`; ConfigError unless it is `path/to/file.py:Class` or `package.module:Class`."""
    module, _, class_name = class_path.rpartition(":")
    if not module or not class_name.isidentifier():
        rule = "name a class as `path/to/file.py:Class` or `package.module:Class`"
        raise ConfigError(field, rule, got=repr(class_path))
    return class_path


def load_class(field: str, class_path: str) -> Any:
    """Imports the class; ConfigError if that fails. A file path is relative to the working directory."""
    module_path, _, class_name = require_class_path(field, class_path).rpartition(":")
    try:
        module = _import_file(Path(module_path)) if module_path.endswith(".py") else import_module(module_path)
        return getattr(module, class_name)
    except Exception as error:  # user code may raise anything
        got = f"{class_path!r} ({type(error).__name__}: {error})"
        raise ConfigError(field, "name a class that can be imported", got=got) from error


def _import_file(path: Path) -> ModuleType:
    name = f"megahead_custom_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        specification = spec_from_file_location(name, path)
        assert specification is not None
        assert specification.loader is not None
        module = sys.modules[name] = module_from_spec(specification)  # dataclasses look up their module in sys.modules
        try:
            specification.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def shipped_folder() -> Path:
    """`configs/`: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def shipped_configs() -> list[str]:
    """Names of the configs that ship with megahead: `demo-headless`, ..."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))


def may_be_shipped(path: Path) -> bool:
    """Whether `path` has the form of a shipped config: `demo-headless` or `configs/demo-headless.yaml`."""
    return path.parent in (Path(), Path("configs"))


def find_config(path: Path) -> Path:
    """Returns `path` if it is a file, else the shipped config of that name, else `path`."""
    name = path.name.removesuffix(".yaml")
    if may_be_shipped(path) and not path.is_file() and name in shipped_configs():
        return shipped_folder() / f"{name}.yaml"
    return path


def find_referenced_file(name: str, config_file: Path | None = None) -> Path:
    """The file `name` that a setting of `config_file` refers to; `name` itself if it is not found.

    Searches the working directory, then the folder of `config_file` and its parents, then the shipped `configs/`.
    """
    path = Path(name)
    folders = [] if config_file is None else config_file.absolute().parents
    shipped = Path(*path.parts[path.parts[:1] == ("configs",) :])
    candidates = [path, *(folder / path for folder in folders), shipped_folder() / shipped]
    return next((candidate for candidate in candidates if candidate.is_file()), path)
