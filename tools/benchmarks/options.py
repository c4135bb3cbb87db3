"""What the commands of benchmarks share: an option, and how their lines are told."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megahead.report.tables import Row, to_json, to_rich
from megahead.terminal import terminal


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """With `--output`, of a command whose module says what it does."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the table's lines there")
    return parser


def tell(*tables: Sequence[Row], output: Path | None = None) -> None:
    """Prints tables, and writes the lines of all to the file that was asked for."""
    for lines in tables:
        terminal(width=160).print(to_rich(lines))
    if output is not None:
        output.write_text(to_json([line for lines in tables for line in lines]), encoding="utf-8")


def numbers(text: str) -> list[int]:
    """Of `1,2,3`."""
    return [int(part) for part in text.split(",")]
