"""Writes docs/configuration.md from the schema: every setting with its type, range, default and description.

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
HEADER = """# Configuration

The settings of a run's YAML file; on the command line `--set section.field=value`. Brackets hold type, range and
default; a setting without a default is left out. `python tools/configuration_page.py` writes this page from
`megahead/config`.
"""
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}
Schema = Mapping[str, Any]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")


def render() -> str:
    """The page: the run's own settings, then section by section."""
    schema, parts = RunConfig.model_json_schema(), [HEADER]
    for name, settings in iterate_sections(schema, schema["$defs"]):
        family_defaults = FAMILY_DEFAULTS if settings["title"] == ModelConfig.__name__ else {}
        rows = [
            _row(field, info, family_defaults, required=field in settings.get("required", ()))
            for field, info in settings["properties"].items()
            if "description" in info or _describe_type(info) != "section"  # its heading follows
        ]
        description = " ".join(settings.get("description", "").split())
        description += " **Required.**" if name in schema["required"] else ""
        title = f"## {name}" if name else "## The run"
        parts.append("\n".join([title, "", description, "", *rows, ""]))
    sizes = ", ".join(f"`{size}`" for size in NAMED_SIZES)
    return "\n".join([*parts, f"Named sizes (`model.size`): {sizes}.\n"])


def iterate_sections(settings: Schema, all_settings: Schema, name: str = "") -> Iterator[tuple[str, Schema]]:
    """Yields (section name, schema), from the run's top level down."""
    yield name, settings
    for field, info in settings["properties"].items():
        for title in _referenced_sections(info):
            yield from iterate_sections(all_settings[title], all_settings, f"{name}.{field}" if name else field)


def _row(field: str, info: Schema, family_defaults: Mapping[str, Schema], *, required: bool) -> str:
    """A list item; `family_defaults`: those of model families that differ."""
    description = " ".join(info.get("description", "").split())  # a section's description comes under its own heading
    families: dict[str, list[str]] = {}  # by their default
    for family, values in family_defaults.items():
        if field in values and values[field] != info.get("default"):
            families.setdefault(_format_value(values[field]), []).append(family)
    defaults = [f"{value} for {', '.join(names)}" for value, names in families.items()]
    if info.get("default") is not None and not [*_referenced_sections(info)]:
        defaults.insert(0, _format_value(info["default"]))
    default = "; **required**" if required else f"; default {'; '.join(defaults)}" if defaults else ""
    return f"- `{field}` ({_describe_type(info)}{default}){f': {description}' if description else ''}"


def _describe_type(info: Schema) -> str:
    """A type in words, with its range: `number in (0, 1]`."""
    options = [option for option in _options(info) if option.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(_describe_type(option) for option in options))
    if "$ref" in info:
        return "section"
    if "enum" in info or "const" in info:
        return ", ".join(f"`{value}`" for value in info.get("enum", [info.get("const")]))
    if "prefixItems" in info:
        return f"list of {TYPES[info['prefixItems'][0]['type']]}s"
    if info["type"] == "array":
        name = f"list of {TYPES.get(info['items'].get('type'), 'section')}s{_describe_range(info['items'])}"
    else:
        name = TYPES.get(info["type"], "settings")
    return name + _describe_range(info) + (", not empty" if "minLength" in info or "minItems" in info else "")


def _describe_range(info: Schema) -> str:
    """Two bounds as an interval, a single one after its sign."""
    bounds = {bound: _format_number(info[bound]) for bound in BOUNDS if bound in info}
    if len(bounds) == 2:
        (low, least), (high, most) = bounds.items()
        return f" in {'[' if low == 'minimum' else '('}{least}, {most}{']' if high == 'maximum' else ')'}"
    return "".join(f" {BOUNDS[bound]} {number}" for bound, number in bounds.items())


def _format_number(value: float) -> str:
    """Formats large powers of two as `2^N`."""
    power = int(value).bit_length() - 1
    return f"2^{power}" if power > 15 and value == 2**power else f"{value:,g}" if value < 1e6 else f"{value:.0e}"


def _format_value(value: Any) -> str:
    """A value in YAML's syntax."""
    return f"`{str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value}`"


def _options(info: Schema) -> list[Schema]:
    return [*info.get("anyOf", ()), *info.get("oneOf", ())]


def _referenced_sections(info: Schema) -> Iterator[str]:
    """Names of the section schemas that a type refers to, directly, in a union or in a list."""
    if "$ref" in info:
        yield info["$ref"].rpartition("/")[2]
    for part in (*_options(info), *([info["items"]] if isinstance(info.get("items"), Mapping) else [])):
        yield from _referenced_sections(part)


if __name__ == "__main__":
    main()
