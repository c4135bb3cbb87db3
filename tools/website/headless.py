"""Draws the figure of what a vanilla and a headless model compare a hidden state with."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

from megahead.report.figures import INK, MUTED, PALETTE, save_figure

SIZE = (9.0, 4.4)
"""Inches."""

BLUE, ORANGE = PALETTE[:2]
VANILLA_CAPTION = "All tokens compete: N × V scores", "V: tens of thousands of tokens; N: targets of the batch"
HEADLESS_CAPTION = "Few compete, no head: N × U scores", "U: the different targets of the batch, a few thousand"
LINE_COLOUR, BACKGROUND = "#d5dbe3", "#ffffff"
ARROW = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0, "color": MUTED, "linewidth": 1.4}


def draw(output: Path) -> Path:
    """Writes the PNG, with a background colour, so that it is readable on dark pages, too."""
    figure = Figure(figsize=SIZE, facecolor=BACKGROUND)
    left, right = (figure.add_axes((x, 0, 0.5, 1)) for x in (0, 0.5))
    for axes, colour, name, question, cost, meaning in (
        (left, ORANGE, "Vanilla", "Which token of the whole vocabulary comes next?", *VANILLA_CAPTION),
        (right, BLUE, "Headless", "Which of the tokens in this batch comes next?", *HEADLESS_CAPTION),
    ):
        axes.set(xlim=(0, 100), ylim=(0, 98))
        axes.axis("off")
        axes.text(6, 91, name, color=colour, fontsize=18, fontweight="bold", va="center")
        axes.text(6, 82.5, question, color=INK, fontsize=10.5, va="center")
        axes.text(6, 10.5, cost, color=INK, fontsize=11, fontweight="bold", va="center")
        axes.text(6, 5, meaning, color=MUTED, fontsize=9, va="center")
        _draw_model(axes)
    left.plot([100, 100], [7, 91], color=LINE_COLOUR, linewidth=1, clip_on=False)
    _draw_vanilla(left)
    _draw_headless(right)
    return save_figure(figure, output)


def _draw_vanilla(axes: Axes) -> None:
    bottom, pitch, target = 18.5, 1.0, 13
    _draw_fan(axes, bottom, bottom + 52, ORANGE)
    for row in range(52):
        y, alpha = bottom + pitch * row, 1.0 if row == target else 0.35
        axes.add_patch(Rectangle((60, y), 18, 0.7, color=ORANGE, alpha=alpha, linewidth=0))
    _draw_label(axes, bottom + 54.5, "softmax head, V × D", ORANGE)
    _draw_token(axes, bottom + pitch * (target + 0.4), "sat", is_target=True)
    _draw_token(axes, bottom + 50, "aardvark")
    _draw_token(axes, bottom + 2, "zygote")


def _draw_headless(axes: Axes) -> None:
    _draw_fan(axes, 22, 63, BLUE)
    for k, word in enumerate(("cat", "sat", "on", "the", "mat")):
        y, is_target = 60.5 - 9 * k, word == "sat"
        axes.add_patch(Rectangle((60, y - 2.5), 18, 5, color=BLUE, alpha=1.0 if is_target else 0.35, linewidth=0))
        _draw_token(axes, y, word, is_target=is_target)
    _draw_label(axes, 65, "input embeddings, U × D", BLUE)


def _draw_label(axes: Axes, y: float, text: str, colour: str) -> None:
    axes.text(69, y, text, color=colour, fontsize=9.5, fontweight="bold", ha="center", va="bottom")


def _draw_token(axes: Axes, y: float, word: str, is_target: bool = False) -> None:
    weight, size = ("bold", 12) if is_target else ("normal", 9.5)
    axes.text(81, y, word, color=INK if is_target else MUTED, fontsize=size, fontweight=weight, va="center")


def _draw_model(axes: Axes) -> None:
    """The text so far, the backbone and its hidden state."""
    axes.text(17, 19.5, "The cat …", color=INK, fontsize=12, ha="center", va="center")
    body = FancyBboxPatch((6, 36), 22, 20, boxstyle="round,pad=0,rounding_size=2.5")
    body.set(facecolor="#eef1f5", edgecolor="#c6cad0")
    axes.add_patch(body)
    axes.text(17, 46, "backbone", color=INK, fontsize=11, ha="center", va="center")
    axes.annotate("", (17, 35), (17, 24), arrowprops=ARROW)
    axes.annotate("", (35.5, 46), (28.5, 46), arrowprops=ARROW)
    axes.add_patch(Rectangle((36.5, 38), 3.4, 16, color=INK, linewidth=0))
    axes.text(38.2, 35.5, "hidden\nstate", color=MUTED, fontsize=9, ha="center", va="top", linespacing=1.1)


def _draw_fan(axes: Axes, bottom: float, top: float, colour: str) -> None:
    """A triangle from the hidden state to everything that it is compared with."""
    corners = [(40.6, 46), (59, bottom), (59, top)]
    axes.add_patch(Polygon(corners, color=colour, alpha=0.1, linewidth=0))
