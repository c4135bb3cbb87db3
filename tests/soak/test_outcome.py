"""What a soak writes down and makes of that; its twin has as many ranks at every step, and is compared bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megahead.errors import UserError
from megahead.train.run import pretrain
from soak.faults import Progress
from soak.outcome import Stretch, account, by_kind, compare, finished, mean_cost, share, stretches
from soak.sitting import Journal, Sitting
from support.forked import forked
from support.small_run import small_config, write_text


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


def test_stretches_are_those_that_led_to_the_end(tmp_path: Path) -> None:
    def session(continues: int, ranks: int) -> dict[str, Any]:
        return {"step": continues, "session": {"mesh": {"data": ranks}}}

    def steps(first: int, last: int) -> list[dict[str, Any]]:
        return [{"step": step} for step in range(first, last + 1)]

    log = [session(0, 2), *steps(1, 9), session(6, 1), *steps(7, 8), session(6, 2), *steps(7, 12), session(12, 2)]
    log += [*steps(13, 20), session(18, 1), *steps(19, 22), session(22, 4), *steps(23, 25)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in log))
    assert stretches(metrics) == [Stretch(18, 2), Stretch(22, 1), Stretch(25, 4)]


def test_runs_are_compared_bit_for_bit(tmp_path: Path) -> None:
    write_text(tmp_path)
    for name, seed in (("run", 1), ("twin", 1), ("other", 2)):
        changes = {"output_dir": str(tmp_path / name), "seed": seed, "data.validation": None, "training.steps": 3}
        forked(pretrain, small_config(tmp_path, changes))
    assert finished(tmp_path / "run")
    same, other = (compare(tmp_path / "run", tmp_path / name) for name in ("twin", "other"))
    assert (same.step, same.same_bits, same.same_rows) == (3, True, True)
    assert same.largest_difference == same.largest_loss_difference == 0
    assert not other.same_bits
    assert other.largest_difference > 0
    assert other.largest_loss_difference > 0
