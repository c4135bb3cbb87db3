"""Writes docs/configuration.md from the schema: every setting with its type, default, rule and sentence.

python tools/configuration_page.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megahead.config.model import DEFAULTS, NAMED_SIZES, ModelConfig
from megahead.config.run import RunConfig

PAGE = Path(__file__).parents[1] / "docs/configuration.md"
HEAD = """# Configuration

What a run's YAML file may say. `--set section.field=value` sets the same on the command line; a mistake ends with one
sentence that names the field. In brackets stand the type, its bounds and the default; without one a setting is left
out by default. This page is written by `python tools/configuration_page.py` from `megahead/config`.
"""
SIGNS = {Gt: "above", Ge: "at least", Lt: "below", Le: "at most"}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")


def render() -> str:
    """The page: the run's own settings, then section by section."""
    parts = [HEAD]
    for name, settings in sections(RunConfig):
        families = DEFAULTS if settings is ModelConfig else {}
        rows = [_row(field, info, families) for field, info in settings.model_fields.items()]
        about = " ".join((settings.__doc__ or "").split())
        title = f"## {name}" if name else "## The run"
        parts.append("\n".join([title, "", about, "", *rows, ""]))
    sizes = ", ".join(f"`{size}`" for size in NAMED_SIZES)
    return "\n".join([*parts, f"Named sizes (`model.size`): {sizes}.\n"])


def sections(settings: type[BaseModel], name: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The settings classes from the run downwards, with the names of their sections."""
    yield name, settings
    for field, info in settings.model_fields.items():
        for inner in _settings_in(info.annotation):
            yield from sections(inner, f"{name}.{field}" if name else field)


def _row(field: str, info: FieldInfo, families: Mapping[str, Mapping[str, Any]]) -> str:
    """`families`: their own defaults, where they differ."""
    inner = list(_settings_in(info.annotation))
    about = " ".join((info.description or "").split())  # what a section is, it says where it stands
    rule = _rule(info.metadata)
    others = [f"{family} {_shown(values[field])}" for family, values in families.items() if field in values]
    own = "" if inner else _shown(info.default)
    if info.default is PydanticUndefined or info.default is None:
        own = "" if info.default is None else "**required**"
    default = ", ".join([own, *others] if own else others)
    default = default if own == "**required**" or not default else f"default {default}"
    kind = f"{_type(info.annotation)}{f', {rule}' if rule else ''}{f'; {default}' if default else ''}"
    return f"- `{field}` ({kind}){f': {about}' if about else ''}"


def _type(annotation: Any) -> str:
    """A type as a reader of YAML says it."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        rule = _rule(metadata)
        return f"{_type(inner)}{f' {rule}' if rule else ''}"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(kind) for kind in get_args(annotation) if kind is not NoneType))
    if get_origin(annotation) is dict:
        return "settings"
    if get_origin(annotation) in (list, tuple):
        kinds = [kind for kind in get_args(annotation) if kind is not Ellipsis]
        return f"list of {_type(kinds[0])}s"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}[annotation]


def _rule(metadata: list[Any]) -> str:
    """Bounds in words: at least 0, below 1."""
    words = [
        f"{sign} {_count(getattr(bound, kind.__name__.lower()))}"
        for bound in metadata
        for kind, sign in SIGNS.items()
        if isinstance(bound, kind)
    ]
    return ", ".join(words + ["not empty" for bound in metadata if isinstance(bound, MinLen)])


def _count(value: float) -> str:
    """Large powers of two as such."""
    power = int(value).bit_length() - 1
    return f"2^{power}" if power > 15 and value == 2**power else f"{value:,g}" if value < 1e6 else f"{value:.0e}"


def _shown(value: Any) -> str:
    """A value as YAML has it."""
    plain = str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value
    return f"`{plain}`"


def _settings_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Settings classes inside a type, such as `X | None` or a list of X."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        if not isinstance(part, str):
            yield from _settings_in(part)


if __name__ == "__main__":
    main()
