"""YAML and `--set a.b=c` into a RunConfig; every mistake reported, each in one sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megahead.config.run import RunConfig
from megahead.errors import ConfigError, ConfigErrors, UserError


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-4` is a number, and a key given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run's YAML file and applies overrides such as `optimizer.learning_rate=1e-3`.

    Raises ConfigErrors with every mistake at once, or UserError when the file cannot be read.
    """
    tree = _read_yaml(Path(path))
    for override in overrides:
        _apply(tree, override)
    return config_from_dict(tree, source=str(path))


def config_from_dict(tree: Mapping[str, Any], source: str = "the configuration") -> RunConfig:
    """A checked RunConfig from plain nested dicts, as they stand in YAML or in a checkpoint's JSON."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = [_sentence(details) for details in error.errors()]
        raise ConfigErrors(source, problems) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"`--config` must name a readable YAML file, but is {path} instead ({reason}).") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} must be YAML, but is not: {' '.join(str(error).split())}.") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold settings as `key: value`, but holds {type(tree).__name__} instead.")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(
            "--set", "look like section.field=value", got=repr(override), hint="try --set training.steps=100"
        )
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        value = text
    *parents, leaf = key.split(".")
    section = tree
    for name in parents:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[leaf] = value


def _sentence(details: ErrorDetails) -> str:
    """One pydantic error as our sentence."""
    location = [str(part) for part in details["loc"] if not str(part).startswith("<")]  # which kind of a union it is
    inner = details.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        field = ".".join([*location, inner.field]) if inner.field not in location else ".".join(location)
        return str(ConfigError(field, inner.rule, got=inner.got, hint=inner.hint))
    field = ".".join(location)
    if details["type"] == "extra_forbidden":
        return _unknown_key(location)
    if details["type"] == "missing":
        return f"`{field}` must be given, but is missing{_purpose(location)}."
    message = details["msg"].removeprefix("Input should be ").removeprefix("String should ")
    rule = message if message.startswith(("have", "match")) else f"be {message}"
    return str(ConfigError(field, rule, got=repr(details["input"])))


def _unknown_key(location: list[str]) -> str:
    *parents, key = location
    fields = _fields_at(parents)
    near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
    fix = f"did you mean `{'.'.join([*parents, near[0]])}`?" if near else f"known here: {', '.join(fields)}."
    return f"`{'.'.join(location)}` is not a setting; {fix}"


def _purpose(location: list[str]) -> str:
    owner = _section_at(location[:-1])
    described = owner.model_fields[location[-1]].description if owner else None
    return f" ({described.splitlines()[0].rstrip('.')})" if described else ""


def _fields_at(parents: Sequence[str]) -> list[str]:
    owner = _section_at(parents)
    return list(owner.model_fields) if owner else []


def _section_at(parents: Sequence[str]) -> type[BaseModel] | None:
    """The settings class that the path names, looking through `X | None`."""
    owner: type[BaseModel] = RunConfig
    for name in parents:
        annotation = owner.model_fields[name].annotation if name in owner.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        found = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if found is None:
            return None
        owner = found
    return owner
