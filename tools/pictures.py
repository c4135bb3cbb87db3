"""Draws the pictures of docs that no experiment makes.

python tools/pictures.py headless     docs/headless.png: what each kind of model compares a hidden state with
python tools/pictures.py verdict      docs/research/verdict.png: headless and vanilla along tokens and along time, from
                                      two tables of that page
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "research/verdict.md"
PICTURES = {"headless": DOCS / "headless.png", "verdict": PAGE.with_suffix(".png")}
HEADLESS_TOKENS_A_MINUTE = 104.9e6 / 135  # the longest run's
COST_OF_VANILLA = 3.8  # time of a vanilla token where a headless one takes 1
LONG, LEVEL = "## A hundred million tokens", "### As many tokens by both"  # headings that the tables stand under

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
    perplexity, blimp = both = [curves(page, score) for score in ("held-out perplexity", "BLiMP")]
    charts = [
        Chart("Held-out perplexity", "tokens", perplexity, log_up=True),
        Chart("Held-out perplexity", "minutes of two cores", along_time(perplexity), log_up=True),
        Chart("BLiMP: pairs that are right, %", "minutes of two cores", along_time(blimp)),
    ]
    print(f"wrote {save_figure(draw_charts(charts), output, description=json.dumps(both))}")


def curves(page: str, score: str) -> Curves:
    """(tokens, score) along each run; the score's columns are those whose titles begin with it."""
    long, level = table_under(page, LONG), table_under(page, LEVEL)
    whole_run = [row for row in long if not row[1].startswith("a branch")]
    of_long, headless = (
        next(place for place, title in enumerate(table[0]) if title.startswith(score)) for table in (long, level)
    )
    return {
        "headless, 105 M tokens": curve(whole_run, of_long),
        "headless, 31.5 M tokens": curve(level, headless),
        "vanilla, 31.5 M tokens": curve(level, headless + 1),
    }


def curve(table: list[list[str]], place: int) -> list[tuple[float, float]]:
    """Of each row the first numbers of its first cell and of another: of `**66.4 ± 0.7**` 66.4."""
    points = [(found(r"\d+(\.\d+)?", row[0]), found(r"\d+(\.\d+)?", row[place])) for row in table[1:] if row[place]]
    return [(1e6 * float(tokens), float(score)) for tokens, score in points]


def along_time(lines: Curves) -> Curves:
    """The same against minutes, computed from what a token costs."""
    cost = {name: COST_OF_VANILLA if name.startswith("vanilla") else 1 for name in lines}
    return {
        name: [(tokens * cost[name] / HEADLESS_TOKENS_A_MINUTE, score) for tokens, score in points]
        for name, points in lines.items()
    }


def table_under(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading: its titles, then its rows."""
    titles, _, *rows = found(r"^(\|.*\n)+", page.partition(f"\n{heading}\n")[2]).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (titles, *rows)]


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError(f"nothing like {pattern} in {text[:80]!r}")
    return match[0]


if __name__ == "__main__":
    main()
