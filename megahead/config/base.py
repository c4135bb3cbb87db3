"""The base class of all settings, and where shipped config files are."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from megahead.errors import ConfigError, FieldError
from megahead.remote_files import refuse_secrets
from megahead.wording import did_you_mean


class Settings(BaseModel):
    """A section of settings. Values derived from them are methods; they are never stored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _text_is_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses zero bytes, at which the system would cut a path off, and secrets, which would be written down."""
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                if "\0" in text:
                    raise ConfigError(str(info.field_name), "have no zero byte", got=repr(text))
                try:
                    refuse_secrets(str(info.field_name), text)
                except FieldError as error:
                    raise ConfigError(error.field, error.rule, got=error.got, hint=error.hint) from None
        return value

    def changed(self, *fields: str) -> dict[str, Any]:
        """Those of the fields, or of all, that are not at their defaults, and what an error says of their values."""
        values = {name: getattr(self, name) for name in fields or type(self).model_fields}
        changed = {name: value for name, value in values.items() if value != type(self).model_fields[name].default}
        return {name: "given" if isinstance(value, Settings) else value for name, value in changed.items()}


def require(holds: object, field: str, rule: str, *, got: Any, hint: str = "") -> None:
    """ConfigError, which says that `field` must RULE, unless that `holds`."""
    if not holds:
        raise ConfigError(field, rule, got=got, hint=hint)


def refuse(field: str, value: Any, why: str) -> None:
    """ConfigError if `field` has a value, which must be left out for this reason."""
    require(not value, field, f"be left out {why}", got=value)


def unknown_setting_message(parents: Sequence[str], key: str, known: Sequence[str]) -> str:
    """The sentence for an unknown `key` in the section `parents`, where these are `known`."""
    fix = did_you_mean(key, known, "".join(f"{parent}." for parent in parents)) or f"known here: {', '.join(known)}."
    return f"`{'.'.join([*parents, key])}` is not a setting; {fix}"


# Classes of one's own, named in a setting by the file or the package that they are in.


def require_class_path(field: str, name: str) -> str:
    """`name`; ConfigError unless it is `path/to/file.py:Class` or `package.module:Class`."""
    where, _, what = name.rpartition(":")
    if not where or not what.isidentifier():
        rule = "name a class as `path/to/file.py:Class` or `package.module:Class`"
        raise ConfigError(field, rule, got=repr(name))
    return name


def load_class(field: str, name: str) -> Any:
    """The class of that name, imported once; ConfigError where it cannot be. A path is seen from the working
    directory."""
    where, _, what = require_class_path(field, name).rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else import_module(where)
        return getattr(module, what)
    except Exception as error:  # whatever its code does
        got = f"{name!r} ({type(error).__name__}: {error})"
        raise ConfigError(field, "name a class that can be imported", got=got) from error


def _load_file(path: Path) -> ModuleType:
    name = f"megahead_custom_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        specification = spec_from_file_location(name, path)
        assert specification is not None
        assert specification.loader is not None
        module = sys.modules[name] = module_from_spec(specification)  # dataclasses look for their module there
        try:
            specification.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def shipped_folder() -> Path:
    """`configs/`: inside of an installed package, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def shipped_configs() -> list[str]:
    """Names of the configs that ship, such as `demo-headless`."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))


def may_be_shipped(path: Path) -> bool:
    """Whether `path` could mean a shipped config: `demo-headless` or `configs/demo-headless.yaml`."""
    return path.parent in (Path(), Path("configs"))


def find_config(path: Path) -> Path:
    """The file `path`, or if there is none, the shipped config of that name."""
    bare = path.name.removesuffix(".yaml")
    if may_be_shipped(path) and not path.is_file() and bare in shipped_configs():
        return shipped_folder() / f"{bare}.yaml"
    return path


def find_referenced_file(name: str, by: Path | None = None) -> Path:
    """The file that the config file `by` calls `name`, or `name` itself if there is none.

    Looks for it from the working directory, then from the folder of `by` and those above it, then in the shipped
    `configs/`.
    """
    path = Path(name)
    above = [] if by is None else by.absolute().parents
    shipped = Path(*path.parts[path.parts[:1] == ("configs",) :])
    places = [path, *(folder / path for folder in above), shipped_folder() / shipped]
    return next((place for place in places if place.is_file()), path)
