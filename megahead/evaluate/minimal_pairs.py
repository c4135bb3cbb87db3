"""Minimal pairs, a right sentence and a wrong one: how often a model gives the right one the higher probability.

BLiMP (Warstadt et al. 2020, arXiv 1912.00582) has 67 paradigms of grammar with 1,000 pairs each, one per file.
Sentences are scored whole, after a space, as in lm-eval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING

from megahead.errors import DataError
from megahead.evaluate.harness_rows import Row, json_lines
from megahead.evaluate.results import Score

if TYPE_CHECKING:
    from megahead.evaluate.language_models import LanguageModel

_PAIRS = json_lines("sentence_good", "sentence_bad", "field", "UID")


def blimp(folder: Path, limit: int | None) -> list[Row]:
    """The pairs in `folder`, the first `limit` of each paradigm; two spellings of a field of grammar become one."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise DataError(f"`{folder}` must hold BLiMP's .jsonl files, but holds none.")
    rows = [row for file in files for row in _PAIRS(file)[:limit]]
    return [{**row, "field": row["field"].replace("/", "_")} for row in rows]


def accuracy_by(key: str) -> Callable[[LanguageModel, Sequence[Row]], list[Score]]:
    """A score function: the mean over all paradigms, then over those of each `key` ("field"; "UID" is one paradigm)."""

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
    """1 or 0; a tie counts half, as guessing would."""
    return 0.5 if good == bad else float(good > bad)


def _mean(metric: str, paradigms: Mapping[str, Sequence[float]]) -> Score:
    """The mean of the paradigms' means; its standard error is over the choice of pairs (None for a single pair)."""
    value = fmean(map(fmean, paradigms.values()))
    if any(len(points) < 2 for points in paradigms.values()):
        return Score(metric, value, None)
    spread = sum(variance(points) / len(points) for points in paradigms.values())
    return Score(metric, value, sqrt(spread) / len(paradigms))
