"""Sentences beside wrong ones that differ in one thing: how often a model finds the right one more likely.

BLiMP (Warstadt et al. 2020, arXiv 1912.00582) has 67 paradigms of grammar with 1,000 pairs each, one a file. Sentences
are scored whole, after a space, as lm-eval scores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING

from megahead.errors import DataError
from megahead.evaluate.harness_rows import Row, lines
from megahead.evaluate.results import Score

if TYPE_CHECKING:
    from megahead.evaluate.language_models import LanguageModel

_PAIRS = lines("sentence_good", "sentence_bad", "field", "UID")


def blimp(folder: Path, limit: int | None) -> list[Row]:
    """The pairs in `folder`, the first `limit` of each paradigm; a field that is spelled in two ways gets one."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise DataError(f"`{folder}` must hold BLiMP's .jsonl files, but holds none.")
    rows = [row for file in files for row in _PAIRS(file)[:limit]]
    return [{**row, "field": row["field"].replace("/", "_")} for row in rows]


def accuracy_by(key: str) -> Callable[[LanguageModel, Sequence[Row]], list[Score]]:
    """A score: the mean over all paradigms, then that over the paradigms of each `key` ("field" or "UID")."""

    def score(model: LanguageModel, pairs: Sequence[Row]) -> list[Score]:
        sentences = [f" {pair[side]}" for pair in pairs for side in ("sentence_good", "sentence_bad")]
        log_p = model.log_probabilities(sentences)
        points: dict[str, list[float]] = {}
        groups: dict[str, dict[str, list[float]]] = {}
        for pair, good, bad in zip(pairs, log_p[::2], log_p[1::2], strict=True):
            its = points.setdefault(pair["UID"], [])
            its.append(_point(good, bad))
            groups.setdefault(pair[key], {})[pair["UID"]] = its
        return [_mean("acc", points), *(_mean(f"acc_{name}", groups[name]) for name in sorted(groups))]

    return score


def _point(good: float, bad: float) -> float:
    """A tie is worth half, as a guess would be."""
    return 0.5 if good == bad else float(good > bad)


def _mean(metric: str, paradigms: Mapping[str, Sequence[float]]) -> Score:
    """Every paradigm counts the same; the error is that of drawing other pairs for them (None for a single pair)."""
    value = fmean(map(fmean, paradigms.values()))
    if any(len(points) < 2 for points in paradigms.values()):
        return Score(metric, value, None)
    spread = sum(variance(points) / len(points) for points in paradigms.values())
    return Score(metric, value, sqrt(spread) / len(paradigms))
