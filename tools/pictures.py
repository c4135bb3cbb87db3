"""Draws the figures of the docs that are not results of tools/paper.py.

python tools/pictures.py headless     docs/headless.png: what each kind of model compares a hidden state with
python tools/pictures.py verdict      docs/research/verdict.png: headless and vanilla against tokens and time, from two
                                      tables of verdict.md
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "research/verdict.md"
PICTURES = {"headless": DOCS / "headless.png", "verdict": PAGE.with_suffix(".png")}
HEADLESS_TOKENS_A_MINUTE = 104.9e6 / 135  # of the longest run
COST_OF_VANILLA = 3.8  # time of a vanilla token relative to a headless one
LONG_HEADING, EQUAL_HEADING = "## A hundred million tokens", "### As many tokens by both"  # headings above the tables
NUMBER = r"\d+(\.\d+)?"

Curves = dict[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("--output", type=Path, metavar="PNG", help="default: the one in docs")
    arguments = parser.parse_args()
    output = arguments.output or PICTURES[arguments.picture]
    if arguments.picture == "headless":
        from website.headless import draw  # needs matplotlib

        print(f"wrote {draw(output)}")
        return
    from experiments.measures import Chart, draw_charts
    from megahead.report.figures import save_figure

    page = PAGE.read_text(encoding="utf-8")
    perplexity, blimp = both = [read_curves(page, score) for score in ("held-out perplexity", "BLiMP")]
    charts = [
        Chart("Held-out perplexity", "tokens", perplexity, log_y=True),
        Chart("Held-out perplexity", "minutes of two cores", to_minutes(perplexity), log_y=True),
        Chart("BLiMP: pairs that are right, %", "minutes of two cores", to_minutes(blimp)),
    ]
    print(f"wrote {save_figure(draw_charts(charts), output, description=json.dumps(both))}")


def read_curves(page: str, score: str) -> Curves:
    """(tokens, score) points of each run; the columns of a score are those whose titles start with it."""
    long_table, equal_table = parse_table(page, LONG_HEADING), parse_table(page, EQUAL_HEADING)
    whole_run = [row for row in long_table if not row[1].startswith("a branch")]
    long_column, equal_column = (
        next(index for index, title in enumerate(table[0]) if title.startswith(score))
        for table in (long_table, equal_table)
    )
    return {
        "headless, 105 M tokens": column_points(whole_run, long_column),
        "headless, 31.5 M tokens": column_points(equal_table, equal_column),
        "vanilla, 31.5 M tokens": column_points(equal_table, equal_column + 1),
    }


def column_points(table: list[list[str]], column: int) -> list[tuple[float, float]]:
    """(tokens, score) points: the first numbers in a row's first cell and in `column` (66.4 in `**66.4 ± 0.7**`)."""
    cells = [(row[0], row[column]) for row in table[1:] if row[column]]
    return [(1e6 * float(match_text(NUMBER, tokens)), float(match_text(NUMBER, score))) for tokens, score in cells]


def to_minutes(lines: Curves) -> Curves:
    """The curves against minutes, from the cost of a token."""
    cost = {name: COST_OF_VANILLA if name.startswith("vanilla") else 1 for name in lines}
    return {
        name: [(tokens * cost[name] / HEADLESS_TOKENS_A_MINUTE, score) for tokens, score in points]
        for name, points in lines.items()
    }


def parse_table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading: titles, then rows."""
    titles, _, *rows = match_text(r"^(\|.*\n)+", page.partition(f"\n{heading}\n")[2]).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (titles, *rows)]


def match_text(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError(f"nothing like {pattern} in {text[:80]!r}")
    return match[0]


if __name__ == "__main__":
    main()
