"""Colours and fonts of figures, and how figures are written to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megahead.files import staged

INK, QUIET, GRID = "#22272e", "#6b7280", "#e7e9ec"
PALETTE = ("#2563b0", "#d9730d", "#1a8a6b", "#a3386f", "#7a5bc0", "#8a6d1d")  # distinct to colour-blind readers too
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": "#c6cad0",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}


def save_figure(figure: Figure, output: Path, *, description: str = "") -> Path:
    """Writes a PNG (150 pixels an inch), whole or not at all; `description`: a text that it carries, such as what was
    drawn."""
    with staged(output) as partial:
        figure.savefig(partial, format="png", dpi=150, metadata={"Description": description} if description else None)
    return output
