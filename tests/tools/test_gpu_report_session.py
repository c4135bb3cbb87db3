"""None of the measurement's parts can spoil another, and what was cut off goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import gpu_report
import pytest
from gpu_report import RESULT, SECONDS, STARTUP_SECONDS, Part, PartRunner, run_part

from support.gpu_parts import quiet

WRITES = "open(result, 'w').write(json.dumps([{'a': 1}]))"


def part_that(folder: Path, name: str, does: str, seconds: float = 30) -> Part:
    """A part whose script is `does`, with the file to write to as its argument."""
    path = folder / f"{name}.py"
    path.write_text(f"import json, os, signal, subprocess, sys, time\nresult = sys.argv[1]\n{does}\n")
    return Part(name, "what?", (str(path), RESULT), seconds)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


class Instant:
    """Launches what takes no time; `given` are its commands."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []

    def __call__(self, command: Sequence[str], said: Path, wrong: Path, limit: float) -> int:
        self.given.append(list(command))
        said.touch()
        return 0


@pytest.fixture
def instant() -> Instant:
    return Instant()


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_report, "_TERM_GRACE_SECONDS", 0.2)
    hanging = part_that(
        tmp_path,
        "hanging",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"print(child.pid, flush=True); {WRITES}\ntime.sleep(60)",
    )

    class Impatient(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            """A slow machine must not end it before it hangs."""
            while not (tmp_path / "hanging.json").exists():
                time.sleep(0.01)
            return super().wait(0.2)

    monkeypatch.setattr(subprocess, "Popen", Impatient)
    outcome = run_part(hanging, tmp_path, 1.0)
    assert (outcome.state, outcome.why) == ("too long", "it had not ended after 1.0s")
    assert outcome.lines == [{"a": 1}]  # what it had written
    child, deadline = int(outcome.said), time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child)


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("sys.exit('error: `--x` must be 1, but is 2 instead.')", "`--x` must be 1, but is 2 instead."),
        ("print('first'); sys.exit(3)", "it ended with code 3:\nfirst"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it was killed, most likely for the machine's memory"),
        (f"{WRITES}; raise MemoryError('CUDA out of memory')", "MemoryError: CUDA out of memory"),
    ],
)
def test_a_part_that_fails_says_why_and_the_next_is_measured(tmp_path: Path, does: str, why: str) -> None:
    parts = [part_that(tmp_path, "failing", does), part_that(tmp_path, "sound", f"print('fine'); {WRITES}")]
    session = PartRunner(tmp_path / "out", quiet())
    session.run_parts(parts, 100)
    failing, sound = session.outcomes.values()
    assert failing.state == "failed"
    assert failing.why.endswith(why)
    assert failing.lines == ([{"a": 1}] if WRITES in does else None)
    assert (sound.state, sound.lines, sound.said) == ("measured", [{"a": 1}], "fine\n")
    page = (tmp_path / "out/report.md").read_text()
    assert why.splitlines()[-1] in page
    assert "fine" in page


def test_being_cut_off_loses_nothing_and_a_second_call_goes_on(tmp_path: Path, instant: Instant) -> None:
    first, second = (Part(name, "what?", (name, RESULT), 30) for name in ("first", "second"))

    def interrupted(command: Sequence[str], said: Path, wrong: Path, limit: float) -> int:
        if command[0] == "second":
            raise KeyboardInterrupt
        return instant(command, said, wrong, limit)

    with pytest.raises(KeyboardInterrupt):
        PartRunner(tmp_path, quiet(), launch=interrupted).run_parts([first, second], 100)
    assert [part["state"] for part in json.loads((tmp_path / "report.json").read_text())["parts"]] == ["measured"]
    PartRunner(tmp_path, quiet(), launch=instant).run_parts([first, second], 100)
    assert [command[0] for command in instant.given] == ["first", "second"]
    PartRunner(tmp_path, quiet(), launch=instant).run_parts(
        [Part("first", "what?", ("first", "other"), 30), second], 100
    )
    assert [command[0] for command in instant.given[2:]] == ["first"]  # another command
    PartRunner(tmp_path, quiet(), again=True, launch=instant).run_parts([first, second], 100)
    assert [command[0] for command in instant.given[3:]] == ["first", "second"]
    PartRunner(tmp_path, quiet(), again=True, launch=instant).run_parts([second], 100)
    assert [command[0] for command in instant.given[5:]] == ["second"]
    assert {part["name"] for part in json.loads((tmp_path / "report.json").read_text())["parts"]} == {"first", "second"}
    assert "## first: what?" in (tmp_path / "report.md").read_text()


def test_a_run_that_is_measured_again_begins_again(tmp_path: Path) -> None:
    """An earlier one, which is finished or was cut off, would go on in its folder."""
    makes_a_run = part_that(tmp_path, "run", f"os.makedirs('{tmp_path}/runs/run'); {WRITES}")
    for _ in range(2):
        outcome = run_part(makes_a_run, tmp_path, 60.0)
        assert (outcome.state, outcome.why) == ("measured", "")


def test_what_cannot_be_done_is_left_out_in_a_sentence(tmp_path: Path, instant: Instant) -> None:
    parts = [
        Part("a", "what?", ("a",), 30, packages=("sys", "not_there", "nor_this")),
        Part("c", "what?", ("c",), 30, unsupported_reason="a text must be given for it, but is not."),
        Part("d", "what?", ("d",), 30),
    ]
    session = PartRunner(tmp_path / "out", quiet(), launch=instant)
    session.run_parts(parts, 100)
    assert [outcome.why for outcome in session.outcomes.values()] == [
        "not_there and nor_this must be installed for it, but are not.",
        "a text must be given for it, but is not.",
        "",
    ]
    session.run_parts([Part("e", "what?", ("e",), 30)], 10)
    assert (session.outcomes["e"].state, session.outcomes["e"].why) == (
        "left out",
        "no time was left for it; 10s were.",
    )


def test_trainings_share_what_time_is_left(tmp_path: Path, instant: Instant) -> None:
    parts = [Part(name, "what?", (name, f"--for={SECONDS}"), 30) for name in "ab"]
    PartRunner(tmp_path, quiet(), launch=instant).run_parts(
        [Part("z", "what?", ("z",), 30), *parts], 2 * STARTUP_SECONDS + 100
    )
    given = [int(command[1].removeprefix("--for=")) for command in instant.given[1:]]
    assert given == [
        pytest.approx(50, abs=2),
        pytest.approx(100 + STARTUP_SECONDS, abs=2),
    ]  # what came before took no time


def test_what_comes_after_trainings_keeps_its_time(tmp_path: Path, instant: Instant) -> None:
    parts = [Part("a", "what?", ("a", f"--for={SECONDS}"), 100), Part("b", "what?", ("b",), 200)]
    PartRunner(tmp_path, quiet(), launch=instant).run_parts(parts, 350)
    assert int(instant.given[0][1].removeprefix("--for=")) == pytest.approx(150 - STARTUP_SECONDS, abs=2)


def test_a_process_that_cannot_be_waited_for_is_ended_all_the_same(tmp_path: Path, monkeypatch) -> None:
    """As when the whole measurement is interrupted."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_part(part_that(tmp_path, "a", "time.sleep(60)"), tmp_path, 1)
    assert started[0].returncode == -signal.SIGTERM
