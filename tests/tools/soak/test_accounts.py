"""What a soak writes down, and what it makes of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.accounts import account, by_kind, mean_cost, share
from benchmarks.soak.journal import Journal, Sitting
from benchmarks.soak.progress import Progress
from megahead.errors import UserError


def log(run: Path, *records: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        for record in records:
            file.write(json.dumps({"tokens": 0, "seconds": 0.0, **record}) + "\n")


def session(continues: int, ranks: int = 2) -> dict[str, Any]:
    return {"step": continues, "session": {"continues": continues, "mesh": {"data": ranks}}}


def step(number: int, seconds: float = 0.5) -> dict[str, Any]:
    return {"step": number, "loss": 1.0, "step_seconds": seconds}


def test_progress_follows_a_log_that_is_written(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    log(tmp_path, session(0), step(1), step(2), step(3, 0.1))
    progress.read()
    assert (progress.step, progress.sessions, progress.ranks, progress.lines) == (3, 1, 2, 3)
    assert progress.usual_seconds() == 0.5
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    progress.read()
    assert progress.step == 3
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text[: text.rindex("\n") + 1])  # as the next session does
    log(tmp_path, {"step": 3, "replica": {}}, session(1, ranks=1), step(2))
    progress.read()
    assert (progress.step, progress.sessions, progress.ranks, progress.lines) == (2, 2, 1, 4)
    assert (progress.steps_since_session, progress.odd_replicas) == (1, 1)


def test_steps_count_once_and_only_while_faults_came(tmp_path: Path) -> None:
    log(tmp_path, session(0), *(step(number) for number in range(1, 9)))
    log(tmp_path, session(5), *(step(number, 0.25) for number in range(6, 11)))
    events = [{"event": 0, "kind": "rank killed", "done": "process 7"}, {"event": 0, "recovered": 2.0}]
    sittings = [Sitting("", 2, 4, 2.0), Sitting("", 6, 9, 3.0)]
    accounts = account(tmp_path, sittings, events)
    assert (accounts.steps, accounts.again, accounts.sessions) == (5, 3, 2)
    assert accounts.useful_seconds == 2 * 0.5 + 3 * 0.25
    assert accounts.effective == pytest.approx(1.75 / 5)
    assert (accounts.events, accounts.faults) == (1, 1)


def test_a_kind_costs_what_it_costs_alone() -> None:
    def outcome(event: int, cost: float) -> dict[str, Any]:
        return {"event": event, "recovered": 60.0, "cost": cost, "again": 2}

    def fault(event: int, kind: str, done: str | None = "x") -> dict[str, Any]:
        return {"event": event, "kind": kind, "done": done}

    lines = [fault(0, "a"), outcome(0, 30.0), fault(1, "a"), fault(1, "b"), outcome(1, 500.0)]
    lines += [fault(2, "b"), fault(2, "a", done=None), outcome(2, 6.0), fault(3, "a"), outcome(3, 42.0)]
    lines += [fault(4, "a")]  # in which the sitting was stopped
    rows = by_kind(lines)
    assert rows == [
        {"fault": "a", "times": 2, "cost, s": 36.0, "most": 42.0, "steps again": 2, "one an hour": "99.00%"},
        {"fault": "b", "times": 1, "cost, s": 6.0, "most": 6.0, "steps again": 2, "one an hour": "99.83%"},
    ]
    assert mean_cost(rows) == 21
    assert share(21, 120) == "82.50%"


def test_another_sitting_goes_on_with_the_next_event(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.next_event() == 0
    journal.note(event=0, kind="a", node=1, done="x")
    journal.sittings.append(Sitting("now", 3, 8, 12.5))
    journal.save()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": 1')  # killed while it wrote
    again = Journal(tmp_path)
    assert again.next_event() == 1
    assert again.seconds() == 12.5
    assert again.sittings == journal.sittings


def test_a_soak_keeps_its_settings_and_its_folder_to_itself(tmp_path: Path) -> None:
    one, another = (Journal(tmp_path).held({"seed": 1}) for _ in range(2))
    with one, pytest.raises(UserError, match="one soak at a time"):
        another.__enter__()
    with pytest.raises(UserError, match="`--seed` must be 1 as this soak began, but is 2 instead"):
        Journal(tmp_path).held({"seed": 2}).__enter__()
