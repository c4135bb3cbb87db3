"""Bad steps, slow ranks, weights that differ between replicas, requests to stop; decided alike on all ranks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

# Bad steps: how they are found, in which micro-batches, and what is done about them; the same on every rank.
#
# A step is skipped before the optimizer sees it if its loss is not finite, or is a spike and the config does more than
# note it. The engine skips a step whose gradients are not finite. Shapes: W ranks, A accumulation steps.


Kind = Literal["loss not finite", "gradients not finite", "overflow", "spike"]
Action = Literal["apply", "skip", "rollback", "stop"]
_OF_NORMAL = 1.4826
"""The standard deviation of a normal distribution is this many times its median absolute deviation."""


@dataclass(frozen=True)
class Fault:
    """What was wrong with a step, and in which micro-batches."""

    kind: Kind
    places: tuple[tuple[int, int], ...]
    """(world rank, micro-step) of every loss that is not finite, or of a spike's highest loss; empty for gradients."""


def robust_score(value: float, others: list[float]) -> float:
    """How many standard deviations `value` is above the median of `others`. The standard deviation is estimated from
    the median absolute deviation, so that single outliers do not matter, and is at least 1 % of the median."""
    middle = median(others)
    deviation = _OF_NORMAL * median([abs(other - middle) for other in others])
    return (value - middle) / max(deviation, 0.01 * abs(middle), 1e-12)


class FaultPolicy:
    """Judges steps by the config's rules. `recent_losses` belong to the training state: they survive a restart."""

    def __init__(self, rules: FaultsConfig) -> None:
        self._rules = rules
        self.consecutive_faults = 0
        """Bad steps since the last good one."""
        self._rollbacks = 0

    def find_loss_fault(self, losses_WA: Tensor, recent_losses: list[float]) -> Fault | None:
        """The fault, if any, that the losses [W, A] of all micro-batches show before the optimizer's step."""
        finite_WA = losses_WA.isfinite()
        if not finite_WA.all():
            return Fault("loss not finite", _places(~finite_WA))
        enough = len(recent_losses) >= self._rules.spike_window // 4
        if enough and robust_score(float(losses_WA.mean()), recent_losses) > self._rules.spike_score:
            return Fault("spike", _places(losses_WA == losses_WA.max()))
        return None

    def must_skip(self, fault: Fault | None) -> bool:
        """Whether the step must not be applied."""
        return fault is not None and (fault.kind != "spike" or self._rules.spike != "note")

    def decide(self, fault: Fault | None) -> Action:
        """What to do about a step; counts bad steps in a row."""
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

    def may_roll_back(self) -> bool:
        """Counts a rollback for another reason than a bad step; whether it is one of those that are allowed."""
        self._rollbacks += 1
        return self._rollbacks < self._rules.most_in_a_row

    def reset_rollbacks(self) -> None:
        """To be called after a save: rollbacks to the new checkpoint are counted from 0."""
        self._rollbacks = 0

    def record_loss(self, loss: float, recent_losses: list[float]) -> None:
        """Adds the loss of an applied step, and drops the oldest beyond the window."""
        recent_losses.append(loss)
        del recent_losses[: -self._rules.spike_window]


def gradient_fault(result: StepResult, dynamic_loss_scale: bool) -> Fault | None:
    """The fault, if any, that the engine found although the losses were fine: gradients that are not finite."""
    if result.applied:
        return None
    overflow = dynamic_loss_scale and not isfinite(result.grad_norm)
    return Fault("overflow" if overflow else "gradients not finite", ())


def _places(bad_WA: Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((int(rank), int(step)) for rank, step in torch.nonzero(bad_WA).tolist())


# Finds a rank that is much slower than the others, although all of them take each step together.
#
# Ranks wait for each other in every step, so that all steps take as long as the slowest rank's. What tells it apart is
# its own computing, the forward passes, before it meets the others. (Ranks that share the computing of a forward pass,
# those of a tensor group, and all of them at ZeRO 3, wait within it and look alike.)


WINDOW_STEPS = 20
"""Steps after which ranks are compared, by their medians: single slow steps do not matter."""

_LEAST_SECONDS = 0.002
"""A step's difference that is worth a line."""


@dataclass(frozen=True)
class SlowRank:
    """Its forward passes of a step take `seconds`, the other ranks' `usual` (both medians)."""

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
        self._steps: list[Sequence[float]] = []
        self._told: int | None = None

    def update(self, forward_seconds: Sequence[float]) -> SlowRank | None:
        """`forward_seconds`: each rank's in this step. A slow rank at the end of a window, unless it was slow in the
        last one too."""
        self._steps.append(forward_seconds)
        if len(self._hosts) == 1 or len(self._steps) < WINDOW_STEPS:
            return None
        usual = [median(times) for times in zip(*self._steps, strict=True)]
        self._steps.clear()
        slowest = max(range(len(usual)), key=usual.__getitem__)
        others = median(seconds for rank, seconds in enumerate(usual) if rank != slowest)
        slow = usual[slowest] > self._ratio * others and usual[slowest] - others > _LEAST_SECONDS
        told, self._told = self._told, slowest if slow else None
        return SlowRank(slowest, self._hosts[slowest], usual[slowest], others) if slow and told != slowest else None


# Compares weights that several ranks hold: the same bits on all of them, unless some have flipped on one.


@dataclass(frozen=True)
class ReplicaMismatch:
    """Ranks whose weights are not those of most replicas (of all replicas, where none are most), and which weights."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]

    def message(self, step: int, hosts: Sequence[str]) -> str:
        first, *others = self.names
        where = ", ".join(sorted({hosts[rank] for rank in self.ranks}))
        more = f" and {pluralize(len(others), 'other weight')}" if others else ""
        return (
            f"step {step:,}: {format_numbers('rank', self.ranks)} ({where}) and other replicas differ in {first}{more}"
        )


def replica_mismatch(sums_DTP: Tensor, names: Sequence[str]) -> ReplicaMismatch | None:
    """`sums_DTP`: checksums of P weights on D data ranks x T tensor ranks, whose world rank is data rank * T + tensor
    rank; None if data ranks agree."""
    data, tensor, _ = sums_DTP.shape
    ranks, odd_names = set(), set()
    for t in range(tensor):
        for p, name in enumerate(names):
            sums = sums_DTP[:, t, p].tolist()
            value, times = Counter(sums).most_common(1)[0]
            if times == data:
                continue
            odd_names.add(name)
            ranks |= {d * tensor + t for d in range(data) if 2 * times <= data or sums[d] != value}
    return ReplicaMismatch(tuple(sorted(ranks)), tuple(name for name in names if name in odd_names)) if ranks else None


# Faults that no loss shows: a rank that is slow, weights that are not the same on all ranks that hold them.


class Health:
    """Watches the ranks of `world_group` (CPU tensors), of which `data_ranks` hold the same. Made on all of them."""

    def __init__(self, rules: FaultsConfig, engine: Engine, world_group: Group, data_ranks: int) -> None:
        self._rules, self._engine, self._world_group, self._data_ranks = rules, engine, world_group, data_ranks
        self.hosts = world_group.all_gather_objects(socket.gethostname())
        """Each rank's."""
        self.stragglers = StragglerDetector(self.hosts, rules.slow_rank)

    def replica_mismatch(self, step: int, *, kept: bool) -> ReplicaMismatch | None:
        """Ranks whose weights differ from others' after `step`; looked for from time to time, and where the weights
        will be `kept`. Reads the weights once, sends 8 bytes for each. Collective."""
        due = self._rules.replicas != "off" and (kept or step % self._rules.replicas_every == 0)
        weights = self._engine.replicated_weights() if due and self._data_ranks > 1 else {}
        if not weights:
            return None
        sums_WP = self._world_group.all_gather(weight_checksums(weights.values()))
        return replica_mismatch(sums_WP.unflatten(0, (self._data_ranks, -1)), list(weights))


# Requests to stop: recorded when a signal arrives, obeyed by all ranks between two steps.


Ending = Literal["finished", "out of time", "stopped"]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@contextmanager
def signal_handlers_restored() -> Iterator[None]:
    """Restores the signal handlers when the block ends."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and _receives_signals():  # None: it was set by no Python code
                signal.signal(number, handler)


def _receives_signals() -> bool:
    """Whether this is the main thread, the only one to which Python gives signals."""
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """Records SIGTERM and SIGUSR1 (preemption, Slurm's `--signal`); further ones change nothing.

    The first Ctrl-C is recorded too (with a message if `prints`), a second one ends the process at once. Made outside
    of the main thread it sees no signals.
    """

    def __init__(self, prints: bool = True) -> None:
        self.signal: str | None = None
        self.received_at: float | None = None
        """When the first did, on the monotonic clock."""
        self._prints = prints
        for number in SIGNALS if _receives_signals() else ():
            signal.signal(number, self._note)

    def is_requested(self, world_group: Group) -> bool:
        """Whether any rank was asked to stop, the same answer on all. Collective."""
        return bool(world_group.all_reduce_max_(torch.tensor(int(self.signal is not None))))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received_at = self.received_at or time.monotonic()
        self.signal = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._prints:
                os.write(2, b"\nsaving after this step, then stopping; Ctrl-C again ends at once\n")
