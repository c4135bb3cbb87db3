"""Tables for the terminal, for Markdown and for programs."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from megahead.report.tables import terminal, to_json, to_markdown, to_rich

ROWS = [
    {"run": "headless", "steps": 12000, "perplexity": 204.96},
    {"run": "a|b [bold]", "steps": 5, "perplexity": float("nan"), "note": "killed"},
]


def test_markdown_is_aligned_and_escaped() -> None:
    assert to_markdown(ROWS) == (
        "| run         |  steps | perplexity | note   |\n"
        "| ----------- | -----: | ---------: | ------ |\n"
        "| headless    | 12,000 |        205 |        |\n"
        "| a\\|b [bold] |      5 |        nan | killed |\n"
    )
    assert to_markdown([]) == ""


def test_json_keeps_exact_values_and_stays_valid() -> None:
    assert json.loads(to_json(ROWS)) == [ROWS[0], {**ROWS[1], "perplexity": None}]


@pytest.mark.parametrize("soft_wrap", [True, False])
def test_a_wide_table_fits_80_columns(soft_wrap: bool) -> None:
    console = terminal(file=io.StringIO(), width=80, soft_wrap=soft_wrap)
    tasks = {f"task {number}": "81.2 ± 0.3" for number in range(9)}
    console.print(to_rich([{"model": "runs/headless/checkpoints/step-00001000-0a1b2c", **tasks}]))
    assert max(map(len, console.file.getvalue().splitlines())) <= 80


def test_the_terminal_table_shows_names_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(to_rich(ROWS, title="Runs"))
    lines = console.file.getvalue().splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["run", "steps", "perplexity", "note"],
        ["headless", "12,000", "205"],
        ["a|b", "[bold]", "5", "nan", "killed"],
    ]
