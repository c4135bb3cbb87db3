"""Draws how close synonyms are in each model's embedding, beside random pairs: one panel per model, one scale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megahead.evaluate.synonyms import Similarities
from megahead.report.style import PALETTE, QUIET, STYLE, save_figure

BINS = np.linspace(-1, 1, 81)


def save_similarities(models: Mapping[str, Similarities], output: Path) -> Path:
    """Writes the figure as a PNG, whole or not at all."""
    return save_figure(draw_similarities(models), output)


def draw_similarities(models: Mapping[str, Similarities]) -> Figure:
    """Histograms of cosines as shares of the pairs, with the means marked; models by name, one panel below another."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.1 + 1.9 * len(models)))
        figure.set_layout_engine("constrained", h_pad=0.1)
        panels: Any = figure.subplots(len(models), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for k, (name, found) in enumerate(models.items()):
            _draw(panels[k], name, found, PALETTE[k % len(PALETTE)])
        panels[-1].set_xlabel("cosine of two words' input embeddings")
        low, high = _range(models)
        panels[0].set_xlim(low, high)
        return figure


def _draw(axes: Axes, name: str, found: Similarities, color: str) -> None:
    for values, tone, label in ((found.random_P, QUIET, "random"), (found.synonyms_P, color, "synonyms")):
        share = np.full(len(values), 1 / len(values))
        mean = float(values.mean())
        axes.hist(values.numpy(), bins=BINS.tolist(), weights=share, color=tone, alpha=0.45)
        axes.axvline(mean, color=tone, label=f"{label}  ·  mean {mean:.3f}")
    axes.set_title(f"{name}  ·  synonyms {found.gap():+.3f}")
    axes.set_ylabel("share of pairs")
    axes.tick_params(length=0)
    axes.legend(loc="upper right", handlelength=1.2)


def _range(models: Mapping[str, Similarities]) -> tuple[float, float]:
    """Limits of the x axis: the range of nearly all cosines, plus a margin."""
    values = np.concatenate([part.numpy() for found in models.values() for part in (found.synonyms_P, found.random_P)])
    low, high = np.quantile(values, [0.001, 0.999])
    return max(-1.0, float(low) - 0.1), min(1.0, float(high) + 0.1)
