"""Reads YAML and `--set a.b=c` into a RunConfig; reports all mistakes at once, each in one sentence."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import orjson
import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megahead.config.base import find_config, may_be_shipped, require, shipped_configs, unknown_setting_message
from megahead.config.data import DATASET_FORMAT
from megahead.config.plan import read_deepspeed
from megahead.config.run import RunConfig, reset_unused
from megahead.errors import ConfigError, ConfigErrors, FieldError, UserError
from megahead.remote_files import RemoteError, Store, is_remote, join_url, redact_secrets, split_url
from megahead.wording import did_you_mean


class _Loader(yaml.SafeLoader):
    """Loads YAML with `1e-4` as a number, dates as text, and duplicate keys as errors."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if key.tag != _MERGE_TAG]
        for k, key in enumerate(keys):
            if key.value in [other.value for other in keys[:k]]:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError) as error:  # a number without digits (`0x_`), or with thousands
            problem = f"{str(node.value)[:40]!r} cannot be read ({error})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_MERGE_TAG, _DATE_TAG = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE_TAG]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_config(path: str | Path, overrides: str | Sequence[str] = ()) -> RunConfig:
    """Reads a run's YAML file, or a shipped one by its name, and applies one or several overrides
    (`optimizer.learning_rate=1e-3`). The content of a DeepSpeed file replaces its name.

    Raises ConfigErrors with all mistakes, or UserError if a file cannot be read.
    """
    file = find_config(Path(path))
    overrides = [overrides] if isinstance(overrides, str) else overrides
    config = config_from_dict(_read_yaml(file), str(path), overrides)
    if isinstance(config.engine.deepspeed, dict):
        return config
    deepspeed = read_deepspeed(config.engine.deepspeed, config_file=file)
    engine = config.engine.model_copy(update={"deepspeed": deepspeed})
    return config.model_copy(update={"engine": engine})


def config_from_dict(
    tree: Mapping[str, Any], source: str = "the configuration", overrides: Sequence[str] = ()
) -> RunConfig:
    """A validated RunConfig from nested dicts, as in YAML, and overrides. Missing settings default to the metadata of
    the training datasets."""
    settings = _with_new_names(deepcopy(dict(tree)))
    for override in overrides:
        _apply_override(settings, override)
        settings = _with_new_names(settings)
    return _validate(with_dataset_defaults(settings), source + (" with --set" if overrides else ""))


def config_from_checkpoint(tree: Mapping[str, Any], source: str) -> RunConfig:
    """The config of the phase that saved a checkpoint (of `objective.schedule`), from its JSON. Cross-section checks
    are skipped: the run passed those of its version. Unused settings, which earlier versions saved, get their
    defaults."""
    return reset_unused(_validate(_with_new_names(tree, quiet=True), source, saved=True))


def _validate(settings: Mapping[str, Any], source: str, *, saved: bool = False) -> RunConfig:
    settings, problems = _without_removed(settings)
    try:
        config = RunConfig.model_validate(settings, context={"saved": saved})
    except ValidationError as error:
        problems += _error_messages(error.errors(), settings)
    if problems:
        raise ConfigErrors(source, problems)
    return config


_RENAMED_FIELDS = {"mirror": "remote_checkpoints", "copy_every": "replicate_every"}
"""{old name: new name} of fields of `training`."""


def _with_new_names(settings: Mapping[str, Any], *, quiet: bool = False) -> dict[str, Any]:
    """The settings with renamed fields, also in `resume.allow`; rank 0 prints a line to stderr for each, unless
    `quiet`."""
    quiet = quiet or any(os.environ.get(name, "0") != "0" for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"))
    training, resume = settings.get("training"), settings.get("resume")
    if isinstance(resume, Mapping) and isinstance(resume.get("allow"), list | tuple):
        new_names = {f"training.{old}": f"training.{new}" for old, new in _RENAMED_FIELDS.items()}
        allow = [new_names.get(name, name) if isinstance(name, str) else name for name in resume["allow"]]
        settings = {**settings, "resume": {**resume, "allow": allow}}
    if not isinstance(training, Mapping):
        return dict(settings)
    for old in [] if quiet else [name for name in training if name in _RENAMED_FIELDS]:
        print(f"training.{old} is called training.{_RENAMED_FIELDS[old]} now", file=sys.stderr, flush=True)
    return {**settings, "training": {_RENAMED_FIELDS.get(name, name): value for name, value in training.items()}}


_REMOVED_FIELDS = {"objective": "nearest", "masking": "similar_share", "data": "nearest_ids"}
"""{section: field}. Files and checkpoints of earlier versions have them, mostly off."""


def _without_removed(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings without removed fields, and an error message for each of these that is not off."""
    remaining, problems = dict(settings), []
    for section, field in _REMOVED_FIELDS.items():
        fields = settings.get(section)
        if isinstance(fields, Mapping) and field in fields:
            remaining[section] = {name: value for name, value in fields.items() if name != field}
            if fields[field]:
                rule = "be left out: hard negatives and similar words made models worse, and were removed"
                hint = "the last version that has it is commit 6e15e94 of megahead 0.1.0"
                problems.append(str(ConfigError(f"{section}.{field}", rule, got=fields[field], hint=hint)))
    return remaining, problems


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        shipped = shipped_configs() if may_be_shipped(path) else []
        suggestion = did_you_mean(path.name.removesuffix(".yaml"), shipped)
        fix = f"; {suggestion}" if suggestion else f"; megahead comes with {', '.join(shipped)}." if shipped else "."
        got = f"{path} instead ({reason}){fix}"
        raise UserError(f"`--config` must name a readable YAML file, but is {got}") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = "" if mark is None else f" in line {mark.line + 1}"
        problem = problem or " ".join(str(error).split())
        raise UserError(f"`{path}` must be YAML, but is not{line}: {problem}.") from None
    if not isinstance(tree, dict):
        content = "nothing" if tree is None else type(tree).__name__
        raise UserError(f"`{path}` must hold settings as `key: value`, but holds {content} instead.")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    got, hint = redact_secrets(repr(override)), "try --set training.steps=100"
    well_formed = equals and all(key.split("."))
    require(well_formed, "--set", "look like section.field=value", got=got, hint=hint)
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        value = text
    *parents, field = key.split(".")
    section = tree
    for depth, name in enumerate(parents, 1):
        if isinstance(section.get(name), str):  # a file, whose other settings would be lost
            hint = f"{'.'.join(parents[:depth])} is {redact_secrets(repr(section[name]))}: set it as a whole"
            raise ConfigError("--set", "name a field of a section", got=got, hint=hint)
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[field] = value


_TYPE_RULES = {"int": "be a whole number", "float": "be a number", "bool": "be true or false", "string": "be text"}
_UNION_TYPES = ("str", "int", "float", "bool")
_TYPE_RULES |= dict.fromkeys(("model", "dict"), "be a section of settings")
_TYPE_RULES |= dict.fromkeys(("tuple", "list"), "be a list")
"""{first word of a pydantic error type: what the message demands}"""


def _error_messages(errors: Sequence[ErrorDetails], settings: Mapping[str, Any]) -> list[str]:
    """One message per field; pydantic has an error for each type of a union."""
    errors_by_field: dict[str, list[ErrorDetails]] = {}
    for details in errors:
        errors_by_field.setdefault(".".join(_location(details)), []).append(details)
    return [_error_message(_location(errors[0]), errors, settings) for errors in errors_by_field.values()]


def _location(details: ErrorDetails) -> list[str]:
    """The path to a field, without the names of a union's types."""
    parts = [str(part) for part in details["loc"]]
    return [part for part in parts if not part.startswith(("<", "literal[", "dict[")) and part not in _UNION_TYPES]


def _error_message(location: list[str], errors: Sequence[ErrorDetails], settings: Mapping[str, Any]) -> str:
    details, field = errors[0], ".".join(location)
    inner = details.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        field = ".".join([*location, inner.field]) if inner.field not in location else field
        return str(ConfigError(field, inner.rule, got=inner.got, hint=inner.hint))
    if details["type"] in ("extra_forbidden", "invalid_key"):  # a key of another type, such as YAML's `on`
        settings_class = _settings_class(location[:-1])
        known = list(settings_class.model_fields) if settings_class else []
        key = location[-1] if details["type"] == "extra_forbidden" else str(details["input"])
        return unknown_setting_message(location[:-1], key, known)
    if details["type"] == "missing":
        reason = missing_dataset_note(settings) if field == "model.vocab_size" else ""
        return f"`{field}` must be given, but is missing{reason}{_description(location)}."
    rules = [_rule(details) for details in errors]
    rule = " or ".join([rules[0], *(rule.removeprefix("be ") for rule in rules[1:])])
    got = "empty" if details["input"] is None else redact_secrets(repr(details["input"]))
    return str(ConfigError(field, rule, got=got))


def _rule(details: ErrorDetails) -> str:
    value_type, _, error = details["type"].partition("_")
    if value_type in _TYPE_RULES and error in ("type", "parsing", "from_float"):
        return _TYPE_RULES[value_type]
    if details["type"] == "string_pattern_mismatch":
        return "consist of letters, digits, dots, dashes and underscores, and not of dots alone"
    if details["type"] in ("too_short", "string_too_short"):
        return "not be empty"
    if details["type"] == "too_long":
        return f"be a list of at most {details['ctx']['max_length']}"
    if details["type"] == "int_parsing_size":
        return "be a smaller number"
    message = details["msg"].removeprefix("Input should be ")
    for old, new in (("greater than or equal to", "at least"), ("less than or equal to", "at most")):
        message = message.replace(old, new)
    return f"be {message}"


def _description(location: list[str]) -> str:
    """The first line of a setting's description, in parentheses; empty without one."""
    settings_class = _settings_class(location[:-1])
    description = settings_class.model_fields[location[-1]].description if settings_class else None
    return f" ({description.splitlines()[0].rstrip('.')})" if description else ""


def _settings_class(path: Sequence[str]) -> type[BaseModel] | None:
    """The class of the section at `path`, also if its annotation is `X | None`, or of a list's elements; None if there
    is no such section."""
    current: type[BaseModel] = RunConfig
    for name in (name for name in path if not name.isdigit()):
        section = _section_within(current.model_fields[name].annotation) if name in current.model_fields else None
        if section is None:
            return None
        current = section
    return current


def _section_within(annotation: Any) -> type[BaseModel] | None:
    """The first class of settings in a type, such as `list[X] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for part in get_args(annotation) if (section := _section_within(part))), None)


# Defaults from the metadata of the training datasets (`PREFIX.json`).


_WITH_DATASET_DEFAULT = (("model", "vocab_size"), ("data", "end_token"), ("data", "tokenizer"))
"""(section, field) of the settings with such a default."""


def with_dataset_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in `tree` with missing ones of `_WITH_DATASET_DEFAULT` filled in, as far as the datasets have them.

    ConfigError if the datasets of a blend differ; RemoteError if vocab_size is missing and a store cannot be read.
    Reads no files if nothing is missing.
    """
    if not all(isinstance(tree.get(section), dict) for section in ("model", "data")):
        return dict(tree)
    filled = {section: dict(tree[section]) for section in ("model", "data")}
    missing = [(section, field) for section, field in _WITH_DATASET_DEFAULT if field not in filled[section]]
    required = ("model", "vocab_size") in missing
    prefixes = _prefixes(filled["data"]) if missing else []
    metadata = {prefix: _metadata(prefix, required=required) for prefix in prefixes}
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
    """The datasets' common value; for tokenizers the first: a run compares them at its start."""
    (first, value), *others = values.items()
    for prefix, other in others if setting != "data.tokenizer" else ():
        got, hint = f"{value} in {first} and {other} in {prefix}", "tokenize their text with one tokenizer"
        require(other == value, "data.train", f"have one {setting} in all datasets", got=got, hint=hint)
    return value


def _metadata(prefix: str, *, required: bool) -> dict[str, Any]:
    """Defaults from a dataset's `PREFIX.json`; empty if it is missing or in another format. `required`: RemoteError if
    a store cannot be read."""
    folder, name = split_url(prefix) if is_remote(prefix) else (Path(prefix).parent, Path(prefix).name)
    try:
        content = orjson.loads(_read(folder, f"{name}.json"))
        if content["format"] != DATASET_FORMAT:
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
