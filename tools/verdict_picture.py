"""Draws docs/research/verdict.png, headless and vanilla along tokens and along time, from two tables of that page.

python tools/verdict_picture.py
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/research/verdict.md"
PICTURE = PAGE.with_suffix(".png")

HEADLESS_TOKENS_A_MINUTE = 104.9e6 / 135  # the longest run's
COST_OF_VANILLA = 3.8  # time of a vanilla token where a headless one takes 1
LONG, LEVEL = "## A hundred million tokens", "### As many tokens by both"  # headings that the tables stand under
Curves = dict[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=PICTURE, help="the PNG (default: the one in docs)")
    output = parser.parse_args().output
    from experiments.charts import Chart, draw_charts
    from megahead.report.figures import save_figure

    perplexity, blimp = both = drawn(PAGE.read_text(encoding="utf-8"))
    charts = [
        Chart("Held-out perplexity", "tokens", perplexity, log_up=True),
        Chart("Held-out perplexity", "minutes of two cores", along_time(perplexity), log_up=True),
        Chart("BLiMP: pairs that are right, %", "minutes of two cores", along_time(blimp)),
    ]
    print(f"wrote {save_figure(draw_charts(charts), output, description=json.dumps(both))}")


def drawn(page: str) -> list[Curves]:
    """What the picture shows of the page: perplexity, and BLiMP."""
    return [curves(page, score) for score in ("held-out perplexity", "BLiMP")]


def curves(page: str, score: str) -> Curves:
    """(tokens, score) along each run; the score's columns are those whose titles begin with it."""
    long, level = table_under(page, LONG), table_under(page, LEVEL)
    whole_run = [row for row in long if not row[1].startswith("a branch")]
    headless = column(level, score)
    return {
        "headless, 105 M tokens": curve(whole_run, column(long, score)),
        "headless, 31.5 M tokens": curve(level, headless),
        "vanilla, 31.5 M tokens": curve(level, headless + 1),
    }


def column(table: list[list[str]], title: str) -> int:
    return next(place for place, full in enumerate(table[0]) if full.startswith(title))


def curve(table: list[list[str]], place: int) -> list[tuple[float, float]]:
    return [(1e6 * number(row[0]), number(row[place])) for row in table[1:] if row[place]]


def along_time(lines: Curves) -> Curves:
    """The same against minutes, computed from what a token costs."""
    cost = {name: COST_OF_VANILLA if name.startswith("vanilla") else 1 for name in lines}
    return {
        name: [(tokens * cost[name] / HEADLESS_TOKENS_A_MINUTE, score) for tokens, score in points]
        for name, points in lines.items()
    }


def table_under(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading: its titles, then its rows."""
    below = page.partition(f"\n{heading}\n")[2]
    titles, _, *rows = found(r"^(\|.*\n)+", below).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (titles, *rows)]


def number(cell: str) -> float:
    """The first one of a cell: of `**66.4 ± 0.7**` 66.4."""
    return float(found(r"\d+(\.\d+)?", cell))


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError(f"nothing like {pattern} in {text[:80]!r}")
    return match[0]


if __name__ == "__main__":
    main()
