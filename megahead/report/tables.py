"""Tables for the terminal, in Markdown and in JSON.

Rows are mappings. The columns are all keys in order of first appearance; a missing value is an empty cell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]


def terminal(**options: Any) -> Console:
    """A console that prints text as it is: names, paths and samples may contain [brackets] and :colons:. `options`:
    those of rich's `Console`."""
    return Console(**({"highlight": False, "markup": False, "emoji": False} | options))


def to_rich(rows: Sequence[Row], title: str | None = None, *, right: Sequence[str] = ()) -> Table:
    """A terminal table; numbers and the columns `right` are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for name in columns(rows):
        table.add_column(Text(name), justify="right" if name in right or _is_numeric(rows, name) else "left")
    for row in rows:
        table.add_row(*(Text(format_value(row.get(name))) for name in columns(rows)))
    return table


def to_markdown(rows: Sequence[Row]) -> str:
    """A Markdown table, padded to be readable as plain text; empty for no rows."""
    names = columns(rows)
    if not names:
        return ""
    grid = [names, *([format_value(row.get(name)) for name in names] for row in rows)]
    grid = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in grid]
    widths = [max(3, *(len(line[k]) for line in grid)) for k in range(len(names))]
    numeric = [_is_numeric(rows, name) for name in names]
    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    lines = []
    for line in (grid[0], rule, *grid[1:]):
        aligned = (f"{cell:{'>' if right else '<'}{w}}" for cell, w, right in zip(line, widths, numeric, strict=True))
        lines.append(f"| {' | '.join(aligned)} |\n")
    return "".join(lines)


def to_json(rows: Sequence[Row]) -> str:
    """The rows with their exact values, as JSON; NaN and infinities become null."""
    encodable = [
        {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in row.items()}
        for row in rows
    ]
    return json.dumps(encodable, indent=1, ensure_ascii=False) + "\n"


def columns(rows: Sequence[Row]) -> list[str]:
    """Every key of any row, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def format_value(value: Any) -> str:
    """Formats a value for display: thousands separators, four significant digits, empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def _is_numeric(rows: Sequence[Row], name: str) -> bool:
    values = [row.get(name) for row in rows if row.get(name) is not None]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
