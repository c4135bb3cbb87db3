"""The page of tools/gpu_report.py: summary tables of steps and trainings, then every part with its output."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

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
