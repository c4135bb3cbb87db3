"""The page of tools/gpu_report.py: summary tables of targets, steps and trainings, then every part with its output."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpu_parts.plan import PREFIX, WHOLE, Outcome
from megahead.report.read import read_metrics
from megahead.report.tables import to_markdown
from megahead.wording import format_duration, to_milliseconds


def step_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each pair of headless and vanilla steps: speed-up, ratio of FLOPs, and headless utilization."""
    rows = []
    for outcome in outcomes:
        line_by_objective = {str(line.get("objective")): line for line in outcome.lines or [] if "GFLOP" in line}
        for suffix in ("", ", compiled"):
            headless, vanilla = line_by_objective.get(f"headless{suffix}"), line_by_objective.get(f"vanilla{suffix}")
            if headless and vanilla:
                speedup, flops_ratio = (vanilla[name] / headless[name] for name in ("ms", "GFLOP"))
                row = {"part": outcome.name + suffix, "headless, ms": headless["ms"], "vanilla, ms": vanilla["ms"]}
                row |= {"times as fast": round(speedup, 2), "by operations": round(flops_ratio, 2)}
                row["of it"] = f"{speedup / flops_ratio:.0%}"
                rows.append(row | {name: headless.get(name) for name in ("MFU", "of rate", "loss", "peak MB")})
    return rows


TARGET_OUTPUTS = 16384  # N of the loss that targets are about: a micro-batch of training


class Target(NamedTuple):
    """A threshold for one measurement of a part."""

    part: str
    metric: str
    threshold: float
    measure: Callable[[Outcome], float | None]  # None: not measured
    is_maximum: bool = False  # whether the threshold is an upper bound


def target_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each target of the parts in `outcomes`."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    rows: list[dict[str, Any]] = []
    for part, metric, threshold, measure, is_maximum in TARGETS:
        if outcome := by_name.get(part):
            value = measure(outcome) if outcome.lines else None
            reached = value is not None and (value <= threshold if is_maximum else value >= threshold)
            state = "not measured" if value is None else "met" if reached else "missed"
            row = {"part": part, "what": metric, "wanted": f"at {'most' if is_maximum else 'least'} {threshold:g}"}
            rows.append(row | {"found": None if value is None else f"{value:.3g}", "": state})
    return rows


def misses_targets(part: str, outcomes: Sequence[Outcome]) -> bool:
    """Whether any target of this part was missed or not measured."""
    states = [row[""] for row in target_rows(outcomes) if row["part"] == part]
    return not states or set(states) != {"met"}


def _loss_rate(hidden: int) -> Callable[[Outcome], float | None]:
    return lambda outcome: _loss_value(outcome, hidden, "ours", "of rate")


def _speedup_over(other: str) -> Callable[[Outcome], float | None]:
    def speedup(outcome: Outcome) -> float | None:
        our_seconds, other_seconds = (_loss_value(outcome, 512, name, "seconds") for name in ("ours", other))
        return other_seconds / our_seconds if our_seconds and other_seconds else None

    return speedup


def _loss_value(outcome: Outcome, hidden: int, form: str, name: str) -> float | None:
    key = {"N": TARGET_OUTPUTS, "hidden": hidden, "form": form}
    values = [line.get(name) for line in outcome.lines or [] if key.items() <= line.items()]
    return values[0] if values else None


def _share_of_flops_ratio(outcome: Outcome) -> float | None:
    """The best speed-up of a headless step as a share of the FLOPs ratio."""
    return max((row["times as fast"] / row["by operations"] for row in step_rows([outcome])), default=None)


def _mfu(outcome: Outcome) -> float | None:
    shares = [line["MFU"] for line in outcome.lines or [] if str(line.get("objective")).startswith("headless")]
    return max((float(share.rstrip("%")) / 100 for share in shares), default=None)


def _our_waits(outcome: Outcome) -> float | None:
    return sum(float(line["a step"]) for line in outcome.lines or [] if line.get("who") == "megahead")


TARGETS = (
    Target("loss", "share of the matrix rate at hidden 512", 0.55, _loss_rate(512)),
    Target("loss", "share of the matrix rate at hidden 2,048", 0.70, _loss_rate(2048)),
    Target("loss", "times as fast as Liger's", 1.0, _speedup_over("liger")),
    Target("loss", "times as fast as Apple's", 1.0, _speedup_over("cut")),
    *(
        Target(f"step-{size}", "of the ratio by operations", 0.90, _share_of_flops_ratio)
        for size in ("70m", "410m", "160m", "bert-base-512")
    ),
    Target("step-70m", "MFU", 0.40, _mfu),
    Target("step-410m", "MFU", 0.50, _mfu),
    *(Target(f"waits-{stage}", "our waits a step", 2, _our_waits, is_maximum=True) for stage in (0, 1, 3)),
)


def training_rows(folder: Path, measured: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each SIZE with both `train-SIZE-headless` and `train-SIZE-vanilla` in `measured`.

    Held-out perplexities are those at the smaller end of both runs, interpolated between evaluations."""
    rows = []
    for name in measured:
        size, vanilla = name.removeprefix(PREFIX).removesuffix("-headless"), name.replace("-headless", "-vanilla")
        if not (name.startswith(PREFIX) and name.endswith("-headless") and vanilla in measured):
            continue
        runs = {"headless": read_metrics(folder / "runs" / name), "vanilla": read_metrics(folder / "runs" / vanilla)}
        row: dict[str, Any] = {"model": size}
        for axis, unit in (("tokens", "M tokens"), ("seconds", "s")):
            end = min(run.validation[-1][axis] for run in runs.values())
            row[unit] = round(end / (1e6 if axis == "tokens" else 1), 1)
            for objective, run in runs.items():
                positions, scores = zip(
                    *((record[axis], log(record["perplexity"])) for record in run.validation), strict=True
                )
                row[f"{objective} after these {axis}"] = exp(float(np.interp(end, positions, scores)))
        for objective, run in runs.items():
            last = run.training[-1]
            row[f"{objective}, tokens/s"] = round(last["tokens"] / last["seconds"])
            row |= {f"{objective}, MFU": f"{last['mfu']:.1%}"} if "mfu" in last else {}
        rows.append(row)
    return rows


def whole_rows(folder: Path, measured: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each part of whole steps: the median step of the run's second half, and vanilla's time over it."""
    seconds_by_name: dict[str, float] = {}
    for name in (name for name in measured if name.startswith(WHOLE)):
        ends = [record["seconds"] for record in read_metrics(folder / "runs" / name).training]
        seconds_by_name[name] = float(np.median(np.diff(ends)[-(len(ends) // 2) :]))
    rows: list[dict[str, Any]] = []
    for name, seconds in seconds_by_name.items():
        vanilla = seconds_by_name.get(name.replace("headless", "vanilla")) if "headless" in name else None
        row = {"steps": name.removeprefix(WHOLE), "ms": to_milliseconds(seconds)}
        rows.append(row | {"vanilla takes": None if vanilla is None else f"{vanilla / seconds:.2f} times as long"})
    return rows


MAX_OUTPUT_CHARS = 20_000  # of a part's output on the page


def render_page(title: str, machine: Mapping[str, str], outcomes: Sequence[Outcome], folder: Path) -> str:
    """Returns Markdown: summary tables, then every part with its command and output. `folder`: of the training runs."""
    measured = [outcome.name for outcome in outcomes if outcome.state == "measured"]
    part_rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        row = {"part": outcome.name, "state": outcome.state, "took": format_duration(outcome.seconds)}
        part_rows.append(row | {"because": outcome.why.partition("\n")[0]})
    tables = {
        "Targets": target_rows(outcomes),
        "Whole steps of the engine": whole_rows(folder, measured),
        "Steps, headless against vanilla": step_rows(outcomes),
        "Trainings, headless against vanilla": training_rows(folder, measured),
        "All parts": part_rows,
    }
    blocks = [f"# {title}\n", to_markdown([{"": name, "is": value} for name, value in machine.items()])]
    blocks += [f"## {name}\n\n{to_markdown(rows)}" for name, rows in tables.items() if rows]
    for outcome in outcomes:
        command = shlex.join(["python", *(outcome.called or outcome.command)])
        output, error = outcome.said[-MAX_OUTPUT_CHARS:].strip("\n"), f"\n{outcome.why}" if outcome.why else ""
        blocks.append(f"## {outcome.name}: {outcome.question}\n\n```console\n$ {command}\n{output}{error}\n```\n")
    return "\n".join(blocks)
