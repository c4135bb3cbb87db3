"""The steps between two lines of the log, as one line tells them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from megahead.config import ObjectiveConfig
from megahead.objectives import DetectionResult, PhraseResult
from megahead.train.state import TrainingState
from megahead.train.step import StepReport


class Interval:
    """Applied steps since it was last begun."""

    def __init__(self, objective: ObjectiveConfig) -> None:
        asked = objective.replaced_tokens
        self._detection_weight = 0.0 if asked is None else asked.weight
        self._reports: list[StepReport] = []
        self._tokens, self._seconds, self._began = 0, 0.0, 0.0

    def begin(self, state: TrainingState) -> None:
        """Forgets all steps, and measures speed from here on."""
        self._reports.clear()
        self._tokens, self._seconds, self._began = state.tokens, state.seconds, time.monotonic()

    def add(self, report: StepReport) -> None:
        """Of the next step."""
        self._reports.append(report)

    def take_back(self, steps: int, state: TrainingState) -> None:
        """Forgets so many of the last ones; where none is left, speed is measured from here on."""
        del self._reports[max(len(self._reports) - steps, 0) :]
        if not self._reports:
            self.begin(state)

    def is_over(self, after_seconds: float) -> bool:
        """Whether it has steps, and lasts so long already."""
        return bool(self._reports) and time.monotonic() - self._began >= after_seconds

    def means(self, state: TrainingState) -> dict[str, float]:
        """Means over its steps, and their speed, under the names that they have in the log."""
        reports, seconds = self._reports, max(state.seconds - self._seconds, 1e-9)
        means = {
            "loss": _mean(r.loss for r in reports),
            "learning_rate": reports[-1].learning_rate,
            "gradient_norm": _mean(r.grad_norm for r in reports),
            "tokens_per_second": (state.tokens - self._tokens) / seconds,
            "step_seconds": seconds / len(reports),
            "step_cpu_seconds": _mean(r.cpu_seconds for r in reports),
            "candidates": _mean(r.candidates for r in reports),
            "skipped_steps": state.skipped_steps,
        }
        if found := [r.detection for r in reports if r.detection is not None]:
            means |= _named("detection", found)
            means["generator_loss"] = means["loss"] - self._detection_weight * means["detection_loss"]
        if found_phrases := [r.phrases for r in reports if r.phrases is not None]:
            means |= _named("phrase", found_phrases)
        if fetched := [r.rows_fetched for r in reports if r.rows_fetched is not None]:
            means["rows_fetched"] = _mean(fetched)
            means["rows_late"] = _mean(r.rows_stale for r in reports)
        return means


def _named(kind: str, found: Sequence[DetectionResult | PhraseResult]) -> dict[str, float]:
    return {f"{kind}_{name}": _mean(getattr(one, name) for one in found) for name in asdict(found[0])}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
