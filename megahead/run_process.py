"""Starts, watches and times runs in subprocesses, which free their memory when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import yaml

from megahead.errors import UserError
from megahead.report.read import last_logged_step, read_metrics

BENCHMARK_STEPS = 12
"""Steps of a run that is timed."""

POLL_SECONDS = 0.5
"""Interval for polling a run that may have to end early."""

MIN_MEASURED_SECONDS = 10.0
"""Training time before its speed is judged."""


def launcher(ranks: int) -> list[str]:
    """Python's arguments before a script or `-m MODULE`, to run it on this many ranks of this machine."""
    return [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]


def environment(ranks: int) -> dict[str, str]:
    """Environment variables of the process: the ranks share the cores, unless OMP_NUM_THREADS is set."""
    if ranks == 1:
        return dict(os.environ)
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), **os.environ}


def pretrain(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int = 1,
    quiet: bool = False,
    must_stop: Callable[[], bool] | None = None,
) -> None:
    """Trains, or resumes. `must_stop` is called twice a second: once it is true, the run saves and stops (before
    training has begun it only stops). UserError if it fails; KeyboardInterrupt if Ctrl-C ended it."""
    command = [sys.executable, *launcher(ranks), "-m", "megahead", "pretrain", "--config", str(config)]
    command += [word for override in overrides for word in ("--set", override)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
    output: str | None = None
    stopped = False
    with (
        _interrupts_recorded() as interrupts,  # the run receives the signal too, and saves
        subprocess.Popen(command, text=True, env=environment(ranks), **streams) as process,  # type: ignore[call-overload]
    ):
        while output is None:
            has_ended = process.poll() is not None  # ranks of a killed launcher may keep its output open
            try:
                output = process.communicate(timeout=None if must_stop is None or stopped else POLL_SECONDS)[0] or ""
            except subprocess.TimeoutExpired as error:
                if has_ended:
                    output = (error.stdout or b"").decode(errors="replace")
                elif must_stop is not None and must_stop():
                    process.terminate()
                    stopped = True
    if process.returncode in (130, -signal.SIGINT) or (process.returncode and interrupts):
        raise KeyboardInterrupt
    if process.returncode and not (stopped and process.returncode == -signal.SIGTERM):
        last = f": {output.strip().splitlines()[-1]}" if output.strip() else ""
        raise UserError(f"training must end by itself, but failed with code {process.returncode}{last}.")


@contextmanager
def _interrupts_recorded() -> Iterator[list[int]]:
    """Ctrl-C in the block raises nothing, at whichever moment it comes; a list of those that came."""
    received, handler = list[int](), signal.getsignal(signal.SIGINT)
    if handler in (None, signal.SIG_IGN) or threading.current_thread() is not threading.main_thread():
        yield received  # it interrupts nothing here
        return
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, handler)


def measure_step_seconds(settings: Mapping[str, Any], *, ranks: int = 1, max_seconds: float | None = None) -> float:
    """The median step time of a short run with these settings, which is deleted. TimeoutError if it has no step within
    `max_seconds` of its start."""
    start_time = monotonic()
    with TemporaryDirectory() as name:
        folder = Path(name)
        trial = {"data": {**settings["data"], "validation": None}, "output_dir": str(folder / "run")}
        trial["schedule"] = {**settings["schedule"], "warmup_steps": 0}
        trial["training"] = {"steps": BENCHMARK_STEPS, "log_seconds": 0, "checkpoint_every": BENCHMARK_STEPS}
        (folder / "run.yaml").write_text(yaml.safe_dump({**settings, **trial}))
        must_stop = None if max_seconds is None else lambda: monotonic() - start_time >= max_seconds
        pretrain(folder / "run.yaml", ranks=ranks, quiet=True, must_stop=must_stop)
        try:
            seconds = sorted(float(record["step_seconds"]) for record in read_metrics(folder / "run").training)
        except UserError:
            raise TimeoutError from None
        return seconds[len(seconds) // 2]


@dataclass
class DeadlineMonitor:
    """Tells whether a run of `steps` misses `deadline` (of `monotonic`), from its wall time per step, evaluations and
    saves included."""

    run: Path
    steps: int
    deadline: float
    startup_seconds: float
    """The cost of a restart."""

    tolerance: float
    """The fewest seconds that a restart must save to be worth it."""

    new_steps: int | None = None
    """The number of steps that fit, set when `must_stop` returns true."""

    step_seconds: float = 0.0
    """Seconds per step, evaluations and saves included; set together with `new_steps`."""

    def __post_init__(self) -> None:
        self._step, self._first = last_logged_step(self.run), (0.0, 0)

    def must_stop(self) -> bool:
        """Whether a restart with fewer steps would end earlier by more than the tolerance."""
        now, step, (first_time, first_step) = monotonic(), last_logged_step(self.run), self._first
        if step == self._step:
            return False
        self._step = step
        if not first_time:
            self._first = (now, step)
        if not first_time or step <= first_step or now - first_time < MIN_MEASURED_SECONDS:
            return False
        seconds_each = (now - first_time) / (step - first_step)
        remaining_seconds = max(0.0, self.deadline - now - self.startup_seconds)
        steps = step + max(1, floor(remaining_seconds / seconds_each))
        saved_seconds = (self.steps - steps) * seconds_each - self.startup_seconds
        if saved_seconds > self.tolerance:
            self.new_steps, self.step_seconds = steps, seconds_each
        return self.new_steps is not None
