"""The page of tools/gpu_report.py: targets, steps and trainings at a glance, then every part and what it printed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpu_parts.plan import PREFIX, Outcome
from megahead.report.read import read_metrics
from megahead.report.tables import to_markdown
from megahead.wording import format_duration


def steps_compared(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """How many times as fast a headless step is, beside what operations alone would give, and how much of the device it
    uses; plain and compiled."""
    rows = []
    for outcome in outcomes:
        lines = {str(line.get("objective")): line for line in outcome.lines or [] if "GFLOP" in line}
        for how in ("", ", compiled"):
            headless, vanilla = lines.get(f"headless{how}"), lines.get(f"vanilla{how}")
            if headless and vanilla:
                faster, fewer = (vanilla[name] / headless[name] for name in ("ms", "GFLOP"))
                row = {"part": outcome.name + how, "headless, ms": headless["ms"], "vanilla, ms": vanilla["ms"]}
                row |= {"times as fast": round(faster, 2), "by operations": round(fewer, 2)}
                row["of it"] = f"{faster / fewer:.0%}"
                rows.append(row | {name: headless.get(name) for name in ("MFU", "of rate", "loss", "peak MB")})
    return rows


OUTPUTS = 16384  # of the loss whose share of the matrix rate counts: a micro-batch of training


class Target(NamedTuple):
    """One number of a part."""

    part: str
    what: str
    wanted: float
    found: Callable[[Outcome], float | None]  # None: it was not measured
    is_limit: bool = False  # whether it is a most and not a least


def judged(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each target of the parts that there are."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    rows: list[dict[str, Any]] = []
    for part, what, wanted, measure, is_limit in TARGETS:
        if outcome := by_name.get(part):
            found = measure(outcome) if outcome.lines else None
            reached = found is not None and (found <= wanted if is_limit else found >= wanted)
            state = "not measured" if found is None else "met" if reached else "missed"
            row = {"part": part, "what": what, "wanted": f"at {'most' if is_limit else 'least'} {wanted:g}"}
            rows.append(row | {"found": None if found is None else f"{found:.3g}", "": state})
    return rows


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


def trainings_compared(folder: Path, measured: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each size of which `measured` has `train-SIZE-headless` and `train-SIZE-vanilla`, run in `folder`:
    held-out perplexities where both have been, read off between evaluations."""
    rows = []
    for name in measured:
        size, twin = name.removeprefix(PREFIX).removesuffix("-headless"), name.replace("-headless", "-vanilla")
        if not name.endswith("-headless") or twin not in measured:
            continue
        runs = {"headless": read_metrics(folder / "runs" / name), "vanilla": read_metrics(folder / "runs" / twin)}
        row: dict[str, Any] = {"model": size}
        for axis, unit in (("tokens", "M tokens"), ("seconds", "s")):
            reached = min(run.validation[-1][axis] for run in runs.values())
            row[unit] = round(reached / (1e6 if axis == "tokens" else 1), 1)
            for objective, run in runs.items():
                places, scores = zip(*((one[axis], log(one["perplexity"])) for one in run.validation), strict=True)
                row[f"{objective} after these {axis}"] = exp(float(np.interp(reached, places, scores)))
        for objective, run in runs.items():
            last = run.training[-1]
            row[f"{objective}, tokens/s"] = round(last["tokens"] / last["seconds"])
            row |= {f"{objective}, MFU": f"{last['mfu']:.1%}"} if "mfu" in last else {}
        rows.append(row)
    return rows


LONGEST = 20_000  # characters of what a part printed that stand on the page


def page_of(title: str, machine: Mapping[str, str], outcomes: Sequence[Outcome], folder: Path) -> str:
    """Markdown: what was found at a glance, then every part with its command and what it printed. `folder`: where
    trainings left their logs."""
    parts = [outcome.name for outcome in outcomes if outcome.state == "measured"]
    short: list[dict[str, Any]] = []
    for one in outcomes:
        row = {"part": one.name, "state": one.state, "took": format_duration(one.seconds)}
        short.append(row | {"because": one.why.partition("\n")[0]})
    tables = {
        "Targets": judged(outcomes),
        "Steps, headless against vanilla": steps_compared(outcomes),
        "Trainings, headless against vanilla": trainings_compared(folder, parts),
        "All parts": short,
    }
    blocks = [f"# {title}\n", to_markdown([{"": name, "is": value} for name, value in machine.items()])]
    blocks += [f"## {name}\n\n{to_markdown(rows)}" for name, rows in tables.items() if rows]
    for one in outcomes:
        command = shlex.join(["python", *(one.called or one.command)])
        said, wrong = one.said[-LONGEST:].strip("\n"), f"\n{one.why}" if one.why else ""
        blocks.append(f"## {one.name}: {one.question}\n\n```console\n$ {command}\n{said}{wrong}\n```\n")
    return "\n".join(blocks)
