"""What the project wants of a GPU, and whether the measurement found it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_report.part import Outcome
from benchmarks.gpu_report.steps import steps_compared

Lines = Sequence[Mapping[str, Any]]
OUTPUTS = 16384
"""Of the loss whose share of the matrix rate counts: a micro-batch of training."""


@dataclass(frozen=True)
class Target:
    """One number of a part."""

    part: str
    what: str
    wanted: float
    found: Callable[[Outcome], float | None]
    """None: it was not measured."""

    is_limit: bool = False
    """Whether it is a most and not a least."""

    def row(self, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
        """Its line of the page."""
        outcome = outcomes.get(self.part)
        found = self.found(outcome) if outcome and outcome.lines else None
        reached = found is not None and (found <= self.wanted if self.is_limit else found >= self.wanted)
        least = f"at {'most' if self.is_limit else 'least'} {self.wanted:g}"
        state = "not measured" if found is None else "met" if reached else "missed"
        told = None if found is None else f"{found:.3g}"
        return {"part": self.part, "what": self.what, "wanted": least, "found": told, "": state}


def judged(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each target of the parts that there are."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    return [target.row(by_name) for target in TARGETS if target.part in by_name]


def falls_short(part: str, outcomes: Sequence[Outcome]) -> bool:
    """Unless all targets of this part were met."""
    states = [row[""] for row in judged(outcomes) if row["part"] == part]
    return not states or set(states) != {"met"}


def _loss_rate(hidden: int) -> Callable[[Outcome], float | None]:
    return lambda outcome: _of_form(outcome, hidden, "ours", "of rate")


def _faster_than(other: str) -> Callable[[Outcome], float | None]:
    def found(outcome: Outcome) -> float | None:
        ours, theirs = (_of_form(outcome, 512, name, "seconds") for name in ("ours", other))
        return theirs / ours if ours and theirs else None

    return found


def _of_form(outcome: Outcome, hidden: int, form: str, name: str) -> float | None:
    which = {"N": OUTPUTS, "hidden": hidden, "form": form}
    values = [line.get(name) for line in outcome.lines or [] if which.items() <= line.items()]
    return values[0] if values else None


def _of_operations(outcome: Outcome) -> float | None:
    """How much of the ratio by operations alone a headless step reaches, at best."""
    return max((row["times as fast"] / row["by operations"] for row in steps_compared([outcome])), default=None)


def _mfu(outcome: Outcome) -> float | None:
    shares = [line["MFU"] for line in outcome.lines or [] if str(line.get("objective")).startswith("headless")]
    return max((float(share.rstrip("%")) / 100 for share in shares), default=None)


def _our_waits(outcome: Outcome) -> float | None:
    return sum(float(line["a step"]) for line in outcome.lines or [] if line.get("who") == "megahead")


TARGETS = (
    Target("loss", "share of the matrix rate at hidden 512", 0.55, _loss_rate(512)),
    Target("loss", "share of the matrix rate at hidden 2,048", 0.70, _loss_rate(2048)),
    Target("loss", "times as fast as Liger's", 1.0, _faster_than("liger")),
    Target("loss", "times as fast as Apple's", 1.0, _faster_than("cut")),
    *(
        Target(f"step-{size}", "of the ratio by operations", 0.90, _of_operations)
        for size in ("70m", "410m", "160m", "bert-base-512", "bert-base-128")
    ),
    Target("step-70m", "MFU", 0.40, _mfu),
    Target("step-410m", "MFU", 0.50, _mfu),
    *(Target(f"waits-{stage}", "our waits a step", 2, _our_waits, is_limit=True) for stage in (0, 1, 3)),
)
