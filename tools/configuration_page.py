"""Writes docs/configuration.md from the schema: every setting with its type, default, rule and sentence.

python tools/configuration_page.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megahead.config.model import FAMILY_DEFAULTS, NAMED_SIZES, ModelConfig
from megahead.config.run import RunConfig

PAGE = Path(__file__).parents[1] / "docs/configuration.md"
HEAD = """# Configuration

What a run's YAML file may say. `--set section.field=value` sets the same on the command line; a mistake ends with one
sentence that names the field. In brackets stand the type, its bounds and the default; without one a setting is left
out by default. This page is written by `python tools/configuration_page.py` from `megahead/config`.
"""
BOUNDS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true`, `false`"}
Schema = Mapping[str, Any]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")


def render() -> str:
    """The page: the run's own settings, then section by section."""
    schema, parts = RunConfig.model_json_schema(), [HEAD]
    for name, settings in sections(schema, schema["$defs"]):
        families = FAMILY_DEFAULTS if settings["title"] == ModelConfig.__name__ else {}
        rows = [
            _row(field, info, families, required=field in settings.get("required", ()))
            for field, info in settings["properties"].items()
        ]
        about = " ".join(settings.get("description", "").split())
        title = f"## {name}" if name else "## The run"
        parts.append("\n".join([title, "", about, "", *rows, ""]))
    sizes = ", ".join(f"`{size}`" for size in NAMED_SIZES)
    return "\n".join([*parts, f"Named sizes (`model.size`): {sizes}.\n"])


def sections(settings: Schema, all_settings: Schema, name: str = "") -> Iterator[tuple[str, Schema]]:
    """Schemas of settings from the run downwards, with the names of their sections."""
    yield name, settings
    for field, info in settings["properties"].items():
        for inner in _sections_in(info):
            yield from sections(all_settings[inner], all_settings, f"{name}.{field}" if name else field)


def _row(field: str, info: Schema, families: Mapping[str, Schema], *, required: bool) -> str:
    """`families`: their own defaults, where they differ."""
    about = " ".join(info.get("description", "").split())  # what a section is, it says where it stands
    defaults = [f"{family} {_shown(values[field])}" for family, values in families.items() if field in values]
    if info.get("default") is not None and not [*_sections_in(info)]:
        defaults.insert(0, _shown(info["default"]))
    default = "; **required**" if required else f"; default {', '.join(defaults)}" if defaults else ""
    return f"- `{field}` ({_type(info)}{default}){f': {about}' if about else ''}"


def _type(info: Schema, between: str = ", ") -> str:
    """A type as a reader of YAML says it, with its bounds: above 0, at most 1."""
    options = [one for one in _options(info) if one.get("type") != "null"]
    if len(options) == 1:
        return _type(options[0])
    if options:
        return " or ".join(dict.fromkeys(_type(one, " ") for one in options))
    if "$ref" in info:
        return "section"
    if "enum" in info or "const" in info:
        return ", ".join(f"`{value}`" for value in info.get("enum", [info.get("const")]))
    rule = [f"{words} {_count(info[bound])}" for bound, words in BOUNDS.items() if bound in info]
    rule += ["not empty"] if "minLength" in info or "minItems" in info else []
    if "prefixItems" in info:
        return f"list of {TYPES[info['prefixItems'][0]['type']]}s"
    if info["type"] == "array":
        kind = f"list of {_type(info['items'], ' ')}s"
    else:
        kind = TYPES.get(info["type"], "settings")
    return f"{kind}{between if rule else ''}{', '.join(rule)}"


def _count(value: float) -> str:
    """Large powers of two as such."""
    power = int(value).bit_length() - 1
    return f"2^{power}" if power > 15 and value == 2**power else f"{value:,g}" if value < 1e6 else f"{value:.0e}"


def _shown(value: Any) -> str:
    """A value as YAML has it."""
    return f"`{str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value}`"


def _options(info: Schema) -> list[Schema]:
    return [*info.get("anyOf", ()), *info.get("oneOf", ())]


def _sections_in(info: Schema) -> Iterator[str]:
    """Names of settings inside a type, such as those or null, or a list of them."""
    if "$ref" in info:
        yield info["$ref"].rpartition("/")[2]
    for part in (*_options(info), *([info["items"]] if isinstance(info.get("items"), Mapping) else [])):
        yield from _sections_in(part)


if __name__ == "__main__":
    main()
