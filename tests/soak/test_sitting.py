"""Events happen, and are over once the run has recovered; a sitting that was killed leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from soak import nodes, sitting
from soak.faults import Event, Fault, Kind, Progress, Script, Stage
from soak.nodes import Disk
from soak.sitting import Cluster, Journal, SoakError


@dataclass
class Node:
    """One that runs, or not."""

    on: bool = True
    away: bool = False

    def runs(self) -> bool:
        return self.on

    def begin(self) -> None:
        self.on = True

    def send(self, number: int) -> None:
        pass

    def kill(self) -> None:
        self.on = False

    ask_to_leave = kill


@dataclass
class Trained:
    """A run that takes a step each time the cluster looks after its nodes, if these are there."""

    metrics: Path
    nodes: list[Node]
    step: int = 0
    training: bool = False

    def goes_on(self) -> None:
        """As ranks do: another session begins once all nodes are there."""
        if all(node.on for node in self.nodes) and not self.training:
            self.begins()
        self.training = all(node.on for node in self.nodes)
        if all(node.on for node in self.nodes):
            self.step += 1
            self._write({"step": self.step, "loss": 1.0, "step_seconds": 0.1})

    def begins(self) -> None:
        self.step -= 1
        self._write({"step": self.step, "session": {"continues": self.step, "mesh": {"data": len(self.nodes)}}})

    def _write(self, record: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Cluster, Trained, list[bool]]:
    """A cluster of two nodes, its run, and whether someone wants to stop."""
    nodes, asked = [Node(), Node()], list[bool]()
    trained = Trained(tmp_path / "metrics.jsonl", nodes, step=2)
    trained.begins()
    stage = Stage(cast(Any, nodes), cast(Any, Node()), cast(Any, None), cast(Any, None), tmp_path)
    cluster = Cluster(stage, Progress(trained.metrics), lambda: bool(asked))
    look_after = cluster.look_after

    def look_after_all() -> None:
        trained.goes_on()
        look_after()

    monkeypatch.setattr(cluster, "look_after", look_after_all)
    monkeypatch.setattr("soak.sitting._POLL_SECONDS", 0.001)
    monkeypatch.setattr("soak.sitting._AGAIN_SECONDS", 0.05)
    return cluster, trained, asked


def kinds(trained: Trained, monkeypatch: pytest.MonkeyPatch, **more: Kind) -> None:
    def lose(stage: Stage, fault: Fault) -> str:
        trained.nodes[fault.node].on = False
        trained.nodes[fault.node].away = True
        return "lost"

    def back(stage: Stage, fault: Fault) -> None:
        trained.nodes[fault.node].away = False

    lost = Kind((0, 0), lose, back, sign=lambda progress: progress.sessions)
    monkeypatch.setattr(sitting, "KINDS", {"lost": lost, **more})


def test_an_event_is_over_when_all_nodes_train_again(
    there: tuple[Cluster, Trained, list[bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, trained, _ = there
    kinds(trained, monkeypatch)
    journal, event = Journal(tmp_path), Event(7, 0.0, (Fault("lost", 1, 0.0, 0.2, 0),))
    cluster.until(cluster.whole, 5, "steps")
    assert sitting.Happening(cluster, journal, event, lambda: None).over()
    begun, ended = journal.events()
    assert (begun["event"], begun["kind"], begun["node"], begun["done"]) == (7, "lost", 1, "lost")
    assert (ended["event"], ended["sessions"], ended["again"]) == (7, 1, 1)
    assert 0.2 < ended["recovered"] < 5
    assert journal.next_event() == 8


def test_a_run_that_does_not_recover_ends_the_soak_and_the_event_is_named(
    there: tuple[Cluster, Trained, list[bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, trained, _ = there
    kinds(trained, monkeypatch, unseen=Kind((0, 0), lambda stage, fault: "x", sign=lambda progress: 0))
    monkeypatch.setattr(sitting, "RECOVERY_SECONDS", 0.2)
    event = Event(3, 0.0, (Fault("unseen", 0, 0.0, 0.0, 0),))
    with pytest.raises(SoakError, match=r"recovery from event 3 \(unseen\) must happen within 0.2 s"):
        sitting.Happening(cluster, Journal(tmp_path), event, lambda: None).over()
    assert "failed" in Journal(tmp_path).events()[-1]


def test_a_soak_sits_for_its_time_and_again_with_the_next_event(
    there: tuple[Cluster, Trained, list[bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, trained, asked = there
    kinds(trained, monkeypatch)
    script = Script(0, {"lost": (0, 0.05)}, frozenset(), 2, every=0.02)
    journal = Journal(tmp_path)
    sitting.sit(cluster, script, journal, 0.6)
    assert 0.6 <= journal.seconds() < 5
    first = journal.next_event()
    assert first > 1
    assert all(not node.on for node in trained.nodes)
    trained.training = False
    sitting.sit(cluster, script, journal, journal.seconds() + 0.4)
    assert journal.next_event() > first
    assert [s.from_step < s.to_step for s in journal.sittings] == [True, True]
    assert {line["event"] for line in journal.events()} == {*range(journal.next_event())}
    asked.append(True)
    sitting.sit(cluster, script, journal, 1e9)


class Host:
    """One without a namespace."""

    name = address = "here"

    def kill(self) -> None:
        pass


@contextmanager
def in_place(folder: Path) -> Iterator[Disk]:
    (folder / "disk").mkdir(exist_ok=True)
    yield Disk(folder / "disk")


@contextmanager
def nowhere(count: int) -> Iterator[Any]:
    yield [Host() for _ in range(count)], None


def test_clocks_bits_and_disk_are_put_right_when_another_sitting_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, instead in {"mounted": in_place, "hosts": nowhere, "may_make_hosts": lambda: True}.items():
        monkeypatch.setattr(sitting, name, instead)
    for name in ("disk/ballast", "node-0/flip", "node-1/ahead"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("24")
    with sitting.cluster(tmp_path, [], 2, "1:2", 0.0, lambda: False):
        assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "elastic.sh"]


def test_a_disk_is_there_once_it_has_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*command: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nodes, "_call", killed)
    with pytest.raises(KeyboardInterrupt), nodes.mounted(tmp_path):
        pass
    assert not (tmp_path / "disk.img").exists()
