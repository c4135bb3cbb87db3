"""Detects bad steps, slow ranks, weight replicas that differ, and requests to stop; the same on all ranks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from statistics import median
from types import FrameType
from typing import Literal

import torch
from torch import Tensor

from megahead.config.training import FaultsConfig
from megahead.distributed.group import Group
from megahead.engine.engine import Engine, StepResult
from megahead.engine.state import weight_checksums
from megahead.wording import format_numbers, pluralize

# Bad steps: their detection, their micro-batches, and the action that the config sets; the same on every rank.
#
# A step is not passed to the optimizer if its loss is not finite, or is a spike, unless `spike` is `note`. The
# engine skips a step whose gradients are not finite. Shapes: W ranks, A accumulation steps.


FaultKind = Literal["loss not finite", "gradients not finite", "overflow", "spike"]
Action = Literal["apply", "skip", "rollback", "stop"]
_STD_PER_MAD = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations (MAD)."""


@dataclass(frozen=True)
class Fault:
    """A bad step's kind of fault and its micro-batches."""

    kind: FaultKind
    micro_batches: tuple[tuple[int, int], ...]
    """(world rank, micro-step) of every loss that is not finite, or of a spike's highest loss; empty for gradients."""


def robust_score(value: float, others: list[float]) -> float:
    """How many standard deviations `value` is above the median of `others`. The standard deviation is estimated from
    the median absolute deviation, which is robust to outliers, and is at least 1 % of the median."""
    center = median(others)
    deviation = _STD_PER_MAD * median([abs(other - center) for other in others])
    return (value - center) / max(deviation, 0.01 * abs(center), 1e-12)


class FaultPolicy:
    """Detects bad steps and chooses actions by the config's rules. `recent_losses` are part of the training state."""

    def __init__(self, rules: FaultsConfig) -> None:
        self._rules = rules
        self.consecutive_faults = 0
        """The number of bad steps since the last good one."""
        self._rollbacks = 0

    def find_loss_fault(self, losses_WA: Tensor, recent_losses: list[float]) -> Fault | None:
        """The fault, if any, of the losses [W, A] of all micro-batches; called before the optimizer's step."""
        finite_WA = losses_WA.isfinite()
        if not finite_WA.all():
            return Fault("loss not finite", _indices(~finite_WA))
        has_enough = len(recent_losses) >= self._rules.spike_window // 4
        if has_enough and robust_score(float(losses_WA.mean()), recent_losses) > self._rules.spike_score:
            return Fault("spike", _indices(losses_WA == losses_WA.max()))
        return None

    def must_skip(self, fault: Fault | None) -> bool:
        """Whether the step must not be applied."""
        return fault is not None and (fault.kind != "spike" or self._rules.spike != "note")

    def decide(self, fault: Fault | None) -> Action:
        """Returns the action for a step; counts consecutive bad steps."""
        kind = None if fault is None else fault.kind
        policies = {None: "apply", "overflow": "skip", "spike": self._rules.spike}
        policy = policies.get(kind, self._rules.bad_step)
        if policy in ("apply", "note"):
            self.consecutive_faults = 0
            return "apply"
        self.consecutive_faults += 1
        self._rollbacks += policy == "rollback"
        if max(self.consecutive_faults, self._rollbacks) >= self._rules.most_in_a_row:
            return "stop"
        return policy  # type: ignore[return-value]

    def limit_reached(self) -> str:
        """What `decide` has stopped for."""
        if self._rollbacks >= self._rules.most_in_a_row > self.consecutive_faults:
            return f"after {self._rollbacks} rollbacks without a save between them"
        return f"{self.consecutive_faults} bad in a row"

    def may_roll_back(self) -> bool:
        """Counts a rollback for another reason than a bad step; returns whether the limit allows it."""
        self._rollbacks += 1
        return self._rollbacks < self._rules.most_in_a_row

    def reset_rollbacks(self) -> None:
        """Restarts the count of rollbacks; to be called after a save, or if there was nothing to go back to."""
        self._rollbacks = 0

    def record_loss(self, loss: float, recent_losses: list[float]) -> None:
        """Adds the loss of an applied step, and drops the oldest beyond the window."""
        recent_losses.append(loss)
        del recent_losses[: -self._rules.spike_window]


def gradient_fault(result: StepResult, dynamic_loss_scale: bool) -> Fault | None:
    """The fault of a step that the engine did not apply, since gradients were not finite; None if it was applied."""
    if result.applied:
        return None
    overflow = dynamic_loss_scale and not isfinite(result.grad_norm)
    return Fault("overflow" if overflow else "gradients not finite", ())


def _indices(bad_WA: Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((int(rank), int(step)) for rank, step in torch.nonzero(bad_WA).tolist())


# Detects a rank that is much slower than the others.
#
# Ranks wait for each other in every step, so that step times do not differ. But forward passes end before the first
# collective: their times do. (Not in a tensor group, nor at ZeRO 3: their forward has collectives.)


WINDOW_STEPS = 20
"""Steps after which ranks are compared by their medians, which are robust to single slow steps."""

_MIN_SECONDS = 0.002
"""The smallest difference per step that is reported."""


@dataclass(frozen=True)
class SlowRank:
    """A rank whose forward passes take `seconds` per step, while the other ranks' take `usual` (both medians)."""

    rank: int
    host: str
    seconds: float
    usual: float

    def message(self, step: int) -> str:
        return (
            f"step {step:,}: rank {self.rank} on {self.host} is slow: its forward passes take {self.seconds:.3g} s a "
            f"step, {self.seconds / self.usual:.1f} times as long as the other ranks', which wait for it"
        )


class StragglerDetector:
    """Compares ranks on `hosts`; one is slow when it takes `ratio` times as long as the median of the others."""

    def __init__(self, hosts: Sequence[str], ratio: float) -> None:
        self._hosts, self._ratio = hosts, ratio
        self._window: list[Sequence[float]] = []
        self._last_slow_rank: int | None = None

    def update(self, forward_seconds: Sequence[float]) -> SlowRank | None:
        """Adds a step's `forward_seconds` of each rank. At the end of a window returns the slow rank, if there is one
        and it was not slow in the previous window."""
        if len(self._hosts) == 1:
            return None
        self._window.append(forward_seconds)
        if len(self._window) < WINDOW_STEPS:
            return None
        medians = [median(times) for times in zip(*self._window, strict=True)]
        self._window.clear()
        slowest = max(range(len(medians)), key=medians.__getitem__)
        usual = median(seconds for rank, seconds in enumerate(medians) if rank != slowest)
        is_slow = medians[slowest] > self._ratio * usual and medians[slowest] - usual > _MIN_SECONDS
        is_new = self._last_slow_rank != slowest
        self._last_slow_rank = slowest if is_slow else None
        return SlowRank(slowest, self._hosts[slowest], medians[slowest], usual) if is_slow and is_new else None


@dataclass(frozen=True)
class ReplicaMismatch:
    """Ranks whose weights differ from most replicas (all ranks, if there is no majority), and the weights' names. They
    differ if a bit has flipped on one of them."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]

    def message(self, step: int, hosts: Sequence[str]) -> str:
        first, *others = self.names
        host_names = ", ".join(sorted({hosts[rank] for rank in self.ranks}))
        more = f" and {pluralize(len(others), 'other weight')}" if others else ""
        ranks = format_numbers("rank", self.ranks)
        return f"step {step:,}: {ranks} ({host_names}) and other replicas differ in {first}{more}"


def weight_mismatch(sums_DTP: Tensor, names: Sequence[str]) -> ReplicaMismatch | None:
    """The mismatch, or None if data ranks agree. `sums_DTP`: checksums of P weights on D data ranks x T tensor ranks;
    world rank = data rank * T + tensor rank."""
    data_size, tensor_size, _ = sums_DTP.shape
    ranks, differing = set(), set()
    for t in range(tensor_size):
        for p, name in enumerate(names):
            sums = sums_DTP[:, t, p].tolist()
            majority, count = Counter(sums).most_common(1)[0]
            if count == data_size:
                continue
            differing.add(name)
            ranks |= {d * tensor_size + t for d in range(data_size) if 2 * count <= data_size or sums[d] != majority}
    return ReplicaMismatch(tuple(sorted(ranks)), tuple(name for name in names if name in differing)) if ranks else None


class HealthMonitor:
    """Monitors the ranks of `world_group` (CPU tensors), with `data_ranks` replicas. Creating it is collective."""

    def __init__(self, rules: FaultsConfig, engine: Engine, world_group: Group, data_ranks: int) -> None:
        self._rules, self._engine, self._world_group, self._data_ranks = rules, engine, world_group, data_ranks
        self.hosts = world_group.all_gather_objects(socket.gethostname())
        """Each rank's host name."""
        self.stragglers = StragglerDetector(self.hosts, rules.slow_rank)

    def weight_mismatch(self, step: int, *, will_save: bool) -> ReplicaMismatch | None:
        """The replicas that differ after `step`, compared every `faults.replicas_every` steps and before each
        save (`will_save`). Reads the weights once, sends 8 bytes for each. Collective."""
        is_due = self._rules.replicas != "off" and (will_save or step % self._rules.replicas_every == 0)
        weights = self._engine.replicated_weights() if is_due and self._data_ranks > 1 else {}
        if not weights:
            return None
        sums_WP = self._world_group.all_gather(weight_checksums(weights.values()))
        return weight_mismatch(sums_WP.unflatten(0, (self._data_ranks, -1)), list(weights))


# Requests to stop: recorded when a signal arrives, acted on by all ranks between two steps.


Ending = Literal["finished", "out of time", "stopped"]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@contextmanager
def signal_handlers_restored() -> Iterator[None]:
    """Restores the signal handlers after the block."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and _can_set_handlers():  # None: not set by Python code
                signal.signal(number, handler)


def _can_set_handlers() -> bool:
    """Whether this is the main thread, the only one in which Python sets and runs signal handlers."""
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """Records SIGTERM and SIGUSR1 (preemption, Slurm's `--signal`), and the first Ctrl-C; the second ends the process.
    Ctrl-C prints a message if `prints`. Records no signals if it is created outside of the main thread."""

    def __init__(self, prints: bool = True) -> None:
        self.signal: str | None = None
        """The name of the last signal."""
        self.received_at: float | None = None
        """The time of the first signal on the monotonic clock."""
        self._prints = prints
        for number in SIGNALS if _can_set_handlers() else ():
            signal.signal(number, self._on_signal)

    def is_requested(self, world_group: Group) -> bool:
        """Whether any rank has received a signal; the same on all. Collective."""
        return bool(world_group.all_reduce_max_(torch.tensor(int(self.signal is not None))))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received_at = self.received_at or time.monotonic()
        self.signal = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._prints:
                with suppress(OSError):  # stderr's reader may have ended, as with `| tee`
                    os.write(2, b"\nsaving after this step, then stopping; Ctrl-C again ends at once\n")
