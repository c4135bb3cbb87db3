"""Reads YAML and `--set a.b=c` into a RunConfig; reports every mistake at once, each in one sentence."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megahead.config.base import find_config, may_be_shipped, require, shipped_configs, unknown_setting_message
from megahead.config.dataset_defaults import missing_dataset_note, with_dataset_defaults
from megahead.config.plan import read_deepspeed
from megahead.config.run import RunConfig, reset_unused
from megahead.errors import ConfigError, ConfigErrors, UserError
from megahead.remote_files import redact_secrets
from megahead.wording import did_you_mean


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: `1e-4` is a number, and a key that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for k, key in enumerate(keys):
            if key in keys[:k]:
                mark = node.value[k][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_config(path: str | Path, overrides: str | Sequence[str] = ()) -> RunConfig:
    """Reads a run's YAML file, or a shipped one by its name, and applies one override or several, such as
    `optimizer.learning_rate=1e-3`. A DeepSpeed file that it names is read as well: the config holds its content.

    Raises ConfigErrors with every mistake at once, or UserError when a file cannot be read.
    """
    file = find_config(Path(path))
    overrides = [overrides] if isinstance(overrides, str) else overrides
    config = config_from_dict(_read_yaml(file), str(path), overrides)
    if isinstance(config.engine.deepspeed, dict):
        return config
    engine = config.engine.model_copy(update={"deepspeed": read_deepspeed(config.engine.deepspeed, by=file)})
    return config.model_copy(update={"engine": engine})


def config_from_dict(
    tree: Mapping[str, Any], source: str = "the configuration", overrides: Sequence[str] = ()
) -> RunConfig:
    """A checked RunConfig from plain nested dicts, as in YAML, and overrides. What the training datasets say of
    themselves is taken from them where it is left out (`dataset_defaults.py`)."""
    settings = _renamed(deepcopy(dict(tree)))
    for override in overrides:
        _apply(settings, override)
        settings = _renamed(settings)
    return _checked(with_dataset_defaults(settings), source + (" with --set" if overrides else ""))


def config_from_checkpoint(tree: Mapping[str, Any], source: str) -> RunConfig:
    """That of the phase which saved a checkpoint, from its JSON. It ran, so its sections are not held against each
    other by the rules of now, and settings that nothing reads are left out: earlier versions saved them."""
    return reset_unused(_checked(_renamed(tree, quiet=True), source, saved=True))


def _checked(settings: Mapping[str, Any], source: str, *, saved: bool = False) -> RunConfig:
    kept, problems = _without_removed(settings)
    try:
        config = RunConfig.model_validate(kept, context={"saved": saved})
    except ValidationError as error:
        problems += _sentences(error.errors(), kept)
    if problems:
        raise ConfigErrors(source, problems)
    return config


_RENAMED = {"mirror": "remote_checkpoints", "copy_every": "replicate_every"}
"""Fields of `training`, by their names in earlier versions."""


def _renamed(settings: Mapping[str, Any], *, quiet: bool = False) -> dict[str, Any]:
    """The settings by their present names, also in `resume.allow`; a line of the first rank on stderr for each earlier
    one."""
    quiet = quiet or any(os.environ.get(name, "0") != "0" for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"))
    training, resume = settings.get("training"), settings.get("resume")
    if isinstance(resume, Mapping) and isinstance(resume.get("allow"), list | tuple):
        new = {f"training.{old}": f"training.{name}" for old, name in _RENAMED.items()}
        allow = [new.get(name, name) if isinstance(name, str) else name for name in resume["allow"]]
        settings = {**settings, "resume": {**resume, "allow": allow}}
    if not isinstance(training, Mapping):
        return dict(settings)
    for old in [] if quiet else [name for name in training if name in _RENAMED]:
        print(f"training.{old} is called training.{_RENAMED[old]} now", file=sys.stderr, flush=True)
    return {**settings, "training": {_RENAMED.get(name, name): value for name, value in training.items()}}


_REMOVED = {"objective": "nearest", "masking": "similar_share", "data": "nearest_ids"}
"""Fields by section. Files and checkpoints of earlier versions hold them, most of them off."""


def _without_removed(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings without removed ones, and a sentence for each of these that is not off."""
    kept, problems = dict(settings), []
    for section, field in _REMOVED.items():
        given = settings.get(section)
        if isinstance(given, Mapping) and field in given:
            kept[section] = {name: value for name, value in given.items() if name != field}
            if given[field]:
                rule = "be left out: hard negatives and similar words made models worse, and were removed"
                hint = "the last version that has it is commit 6e15e94 of megahead 0.1.0"
                problems.append(str(ConfigError(f"{section}.{field}", rule, got=given[field], hint=hint)))
    return kept, problems


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        shipped = shipped_configs() if may_be_shipped(path) else []
        near = did_you_mean(path.name.removesuffix(".yaml"), shipped)
        fix = f"; {near}" if near else f"; megahead comes with {', '.join(shipped)}." if shipped else "."
        got = f"{path} instead ({reason}){fix}"
        raise UserError(f"`--config` must name a readable YAML file, but is {got}") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = "" if mark is None else f" in line {mark.line + 1}"
        problem = problem or " ".join(str(error).split())
        raise UserError(f"`{path}` must be YAML, but is not{place}: {problem}.") from None
    if not isinstance(tree, dict):
        kind = "nothing" if tree is None else type(tree).__name__
        raise UserError(f"`{path}` must hold settings as `key: value`, but holds {kind} instead.")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    given, hint = redact_secrets(repr(override)), "try --set training.steps=100"
    complete = equals and all(key.split("."))
    require(complete, "--set", "look like section.field=value", got=given, hint=hint)
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


_RULES = {"int": "be a whole number", "float": "be a number", "bool": "be true or false", "string": "be text"}
_RULES |= dict.fromkeys(("model", "dict"), "be a section of settings") | dict.fromkeys(("tuple", "list"), "be a list")
"""Rules by the first word of pydantic's name for an error about a value's type."""


def _sentences(errors: Sequence[ErrorDetails], settings: Mapping[str, Any]) -> list[str]:
    """Pydantic's errors as our sentences, one per field: pydantic has an error for each type that a field may have."""
    by_field: dict[str, list[ErrorDetails]] = {}
    for details in errors:
        by_field.setdefault(".".join(_location(details)), []).append(details)
    return [_sentence(_location(found[0]), found, settings) for found in by_field.values()]


def _location(details: ErrorDetails) -> list[str]:
    """The path to a field, without the names of a union's types."""
    parts = [str(part) for part in details["loc"]]
    return [part for part in parts if not part.startswith(("<", "literal[", "dict[")) and part not in ("str", "int")]


def _sentence(location: list[str], errors: Sequence[ErrorDetails], settings: Mapping[str, Any]) -> str:
    details, field = errors[0], ".".join(location)
    inner = details.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        field = ".".join([*location, inner.field]) if inner.field not in location else field
        return str(ConfigError(field, inner.rule, got=inner.got, hint=inner.hint))
    if details["type"] == "extra_forbidden":
        owner = _section_at(location[:-1])
        return unknown_setting_message(location[:-1], location[-1], list(owner.model_fields) if owner else [])
    if details["type"] == "missing":
        why = missing_dataset_note(settings) if field == "model.vocab_size" else ""
        return f"`{field}` must be given, but is missing{why}{_purpose(location)}."
    rules = [_rule(each) for each in errors]
    rule = " or ".join([rules[0], *(rule.removeprefix("be ") for rule in rules[1:])])
    got = "empty" if details["input"] is None else redact_secrets(repr(details["input"]))
    return str(ConfigError(field, rule, got=got))


def _rule(details: ErrorDetails) -> str:
    kind, _, error = details["type"].partition("_")
    if kind in _RULES and error in ("type", "parsing", "from_float"):
        return _RULES[kind]
    if details["type"] == "string_pattern_mismatch":
        return "consist of letters, digits, dots, dashes and underscores, and not of dots alone"
    if details["type"] in ("too_short", "string_too_short"):
        return "not be empty"
    message = details["msg"].removeprefix("Input should be ")
    for theirs, ours in (("greater than or equal to", "at least"), ("less than or equal to", "at most")):
        message = message.replace(theirs, ours)
    return f"be {message}"


def _purpose(location: list[str]) -> str:
    owner = _section_at(location[:-1])
    described = owner.model_fields[location[-1]].description if owner else None
    return f" ({described.splitlines()[0].rstrip('.')})" if described else ""


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
