"""A soak's figures, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.soak.accounts import HOUR, Accounts, Line, by_kind, mean_cost, share
from benchmarks.soak.ending import Comparison
from megahead.report.read import read_metrics
from megahead.report.tables import to_markdown
from megahead.wording import counted, duration


def write(folder: Path, accounts: Accounts, found: Comparison, events: Sequence[Line], settings: dict[str, Any]) -> str:
    """soak.json and soak.md in `folder`; what the second says."""
    kinds = by_kind(events)
    exact = {"settings": settings, "accounts": asdict(accounts), "effective": accounts.effective}
    exact |= {"twin": asdict(found) | {"step_seconds": twin_step_seconds(folder)}, "kinds": kinds}
    (folder / "soak.json").write_text(json.dumps(exact, indent=1) + "\n", encoding="utf-8")
    page = "\n".join([*_lines(accounts, found, settings), *_computed(kinds), "", to_markdown(kinds)])
    (folder / "soak.md").write_text(page + "\n", encoding="utf-8")
    return page


def twin_step_seconds(folder: Path) -> float:
    """Median, without the soak's pauses."""
    seconds = sorted(line["step_seconds"] for line in read_metrics(folder / "twin").training)
    return float(seconds[len(seconds) // 2])


def _lines(accounts: Accounts, found: Comparison, settings: dict[str, Any]) -> list[str]:
    every = accounts.seconds / max(accounts.events, 1)
    rows = "the same rows read" if found.same_rows else "OTHER ROWS READ"
    return [
        f"{duration(accounts.seconds)} on {settings['hosts']} nodes ({settings['ranks']} ranks), seed "
        f"{settings['seed']}: {counted(accounts.faults, 'fault')} in {counted(accounts.events, 'event')}, one every "
        f"{every:.0f} s; {counted(accounts.sessions, 'session')}.",
        f"After {found.step:,} steps and against the undisturbed twin: {_differences(found)}; {rows}.",
        f"{accounts.steps:,} steps counted meanwhile, {accounts.again:,} were lost and done again. Effective training "
        f"time (seconds of the steps that counted, as logged, over wall time): {accounts.effective:.1%}.",
    ]


def _computed(kinds: Sequence[Line]) -> list[str]:
    if not kinds:
        return []
    cost = mean_cost(kinds)
    return [
        f"A fault costs {cost:.0f} s (mean over kinds): {share(cost, HOUR)} at one an hour, {share(cost, 120)} at one "
        "every two minutes."
    ]


def _differences(found: Comparison) -> str:
    if found.same_bits:
        return "the same bits in weights and optimizer"
    return f"weights differ by {found.largest_difference:.1e} at most, losses by {found.largest_loss_difference:.1e}"
