"""What checkpoints are called, which of them led to which, and which are kept: alike in every place that has some.

A name is never used twice: `step-00001980-3f2a91` has six random digits. Each manifest names its parents, and `latest`,
which is put last, the newest checkpoint. The history of a run is the newest one and its parents. All others are
orphaned: the run went back from them, or a crash came before `latest` was put.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import PurePath
from typing import Any, Protocol

from megahead.checkpoints.format import Manifest
from megahead.errors import CheckpointError

# Names of checkpoints. Those of earlier versions have no digits behind the step, and may end in `.replaced`.


_NAME = re.compile(r"step-(\d{8,})(-[0-9a-f]{6})?(\.replaced)?")


def new_name(step: int) -> str:
    """One that no other checkpoint has."""
    return f"step-{step:08d}-{secrets.token_hex(3)}"


def is_name(name: str) -> bool:
    """Whether it is that of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_of(name: str | PurePath) -> int:
    """The step in a checkpoint's name, or in its folder's."""
    found = _NAME.fullmatch(PurePath(name).name)
    if found is None:
        raise ValueError(f"{name} is not the name of a checkpoint")
    return int(found[1])


def without_digits(name: str) -> str:
    """A checkpoint's name by its step alone, which others may share; any other name as it is."""
    found = _NAME.fullmatch(name)
    return f"step-{found[1]}" if found and found[2] else name


def highest_first(names: Iterable[str]) -> list[str]:
    """By step; `.replaced` comes after the other folder of its step."""
    return sorted(names, key=lambda name: (step_of(name), not name.endswith(".replaced"), name), reverse=True)


def _is_old(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and found[2] is None


# Places that have checkpoints, and what led to what there.


@dataclass(frozen=True)
class Latest:
    """What `latest` says: one name a line, the newest checkpoint's first."""

    name: str | None = None

    parents: tuple[str, ...] = ()
    """What led to it, in case its manifest is damaged or gone; empty where an earlier version wrote it."""

    @staticmethod
    def read(text: str) -> Latest:
        """That in the content of the file."""
        name, *parents = text.split() or [""]
        return Latest(name, tuple(filter(is_name, parents))) if is_name(name) else Latest()

    def text(self) -> str:
        """The content of the file."""
        return "".join(f"{name}\n" for name in (self.name, *self.parents))


class Place(Protocol):
    """Where checkpoints are: a disk, a node's memory, a remote store."""

    def names(self) -> list[str]:
        """Those that have a name there, damaged or not, in any order."""

    def manifest(self, name: str) -> Manifest:
        """CheckpointError if it is damaged or gone."""

    @property
    def latest(self) -> Latest:
        """What was put there last; without a name if that says nothing."""

    def point_to(self, latest: Latest) -> None:
        """Puts it there."""

    def remove(self, name: str) -> None:
        """Removes a checkpoint, its name first."""


def leads_to(name: str, parents: Sequence[str]) -> bool:
    """Whether a checkpoint is one of `parents`. Each of an earlier version continues all of these with lower steps."""
    return name in parents or (
        _is_old(name) and step_of(name) <= max(map(step_of, filter(_is_old, parents)), default=-1)
    )


def led_to(parents: Sequence[str], there: Iterable[str]) -> list[str]:
    """Those of some checkpoints that are `parents`, or lead to these, the newest first."""
    nearest = {name: place for place, name in enumerate(parents)}
    found = [name for name in highest_first(there) if leads_to(name, parents)]
    return sorted(found, key=lambda name: nearest.get(name, len(nearest)))


def parents_of(name: str, manifest: Manifest) -> tuple[str, ...]:
    """What led to the checkpoint `name`; of one of an earlier version, itself stands for all of them."""
    return (name,) if _is_old(name) else manifest.parents


def history(place: Place) -> list[str]:
    """The newest checkpoint and what led to it, as far as that is there, the newest first.

    Where the newest is damaged or gone, `latest` has what led to it. Where that says nothing, the one of the highest
    step counts that was not orphaned. One whose manifest is damaged stands before the newest that can be read.
    """
    there = highest_first(place.names())
    damaged = []
    for name in _candidates(place, there):
        try:
            parents = parents_of(name, place.manifest(name))
        except CheckpointError:
            damaged.append(name)
            continue
        return [*damaged, name, *(each for each in led_to(parents, there) if each != name)]
    return damaged


def _candidates(place: Place, there: Sequence[str]) -> Iterator[str]:
    """For the newest one."""
    latest = place.latest
    if latest.name in there:
        yield str(latest.name)
    if latest.parents:
        yield from (name for name in latest.parents if name in there)
        yield from (name for name in there if name not in latest.parents and leads_to(name, latest.parents))
        return
    orphaned = _orphaned_by_any(place, there)
    yield from (name for name in there if name != latest.name and name not in orphaned)


def _orphaned_by_any(place: Place, there: Iterable[str]) -> set[str]:
    orphaned = set[str]()
    for name in there:
        try:
            orphaned.update(place.manifest(name).orphaned)
        except CheckpointError:
            continue
    return orphaned


def orphans(place: Place) -> list[str]:
    """Those that are not of the present history, the highest step first."""
    kept = history(place)
    return [name for name in highest_first(place.names()) if name not in kept]


@dataclass
class Lineage:
    """The checkpoints that led to a run's present weights: not all that are there, if it went back."""

    parents: tuple[str, ...] = ()
    """The one that it last saved or resumed, and what led to that."""

    orphaned: tuple[str, ...] = ()
    """Others that were known."""

    @staticmethod
    def after(name: str | None, manifest: Manifest | None, *known: Iterable[str]) -> Lineage:
        """That of a session that goes on from the checkpoint `name`, or from none; `known`: all that is in places."""
        parents: tuple[str, ...] = ()
        orphaned: set[str] = set()
        if name is not None and manifest is not None:
            parents, orphaned = tuple(dict.fromkeys((name, *parents_of(name, manifest)))), {*manifest.orphaned}
        orphaned |= {each for place in known for each in place}
        return Lineage(parents, tuple(sorted(each for each in orphaned if not leads_to(each, parents))))

    @property
    def tip(self) -> str | None:
        """The checkpoint that the run last saved or resumed; None if there is none yet."""
        return self.parents[0] if self.parents else None

    @property
    def step(self) -> int:
        """Its step; -1 if there is none."""
        return step_of(self.parents[0]) if self.parents else -1

    def add(self, name: str) -> None:
        """The run has saved that one."""
        self.parents = (name, *self.parents)

    def go_back(self, name: str) -> None:
        """The run went back to that one of its parents: later ones are orphaned."""
        at = self.parents.index(name) if name in self.parents else len(self.parents)
        later, kept = self.parents[:at], self.parents[at:] or (name,)
        self.parents, self.orphaned = kept, tuple(sorted({*self.orphaned, *later}))

    def supersedes(self, name: str) -> bool:
        """Whether the run has gone on from that checkpoint, or gone back from it."""
        return leads_to(name, self.parents) or name in self.orphaned


# What is reported of places.


@dataclass(frozen=True)
class Event:
    """What became of a checkpoint in some place."""

    facts: dict[str, Any]
    """For the log."""

    sentence: str | None = None
    """For the console, if something is wrong."""

    record: str = "mirror"
    """The log's name for the place: `mirror`, or `copy` for memory."""


# Which checkpoints are kept: the last few of the history, and those that `KeepRules` name.


@dataclass(frozen=True)
class KeepRules:
    """Which checkpoints of a history are kept."""

    newest: int = 1
    """How many of the newest."""

    every: int | None = None
    """Also those whose step is a multiple of this."""

    steps: Collection[int] = ()
    """Those of these steps."""

    best: int = 0
    """How many of those with the lowest held-out loss (`validation` in their state, if evaluated at their own step)."""

    read_now: Collection[str] = field(default=())
    """Those of these names, which change meanwhile: something reads them just now."""

    def holds(self, name: str) -> bool:
        """Whether a checkpoint is kept, whatever its loss."""
        step = step_of(name)
        return step in self.steps or name in self.read_now or (self.every is not None and step % self.every == 0)


def retain(place: Place, rules: KeepRules) -> None:
    """Removes all of the history except those that `rules` keep. Orphans stay. Manifests are read only if the best are
    kept."""
    newest, *others = history(place)
    earlier: dict[int, str] = {}
    again = []
    for name in others:
        if step_of(name) == step_of(newest) or step_of(name) in earlier:
            again.append(name)  # saved again since, with an evaluation
        else:
            earlier[step_of(name)] = name
    kept = [*earlier.values()]
    best = _best(place, [newest, *kept], rules.best)
    surplus = [name for name in kept[rules.newest - 1 :] if name not in best and not rules.holds(name)]
    for name in [*surplus, *(name for name in again if name not in rules.read_now)]:
        place.remove(name)


def _best(place: Place, names: Iterable[str], count: int) -> set[str]:
    """The `count` checkpoints with the lowest held-out loss."""
    if not count:
        return set()
    losses = {name: loss for name in names if (loss := _held_out_loss(place, name)) is not None}
    return set(sorted(losses, key=losses.__getitem__)[:count])


def _held_out_loss(place: Place, name: str) -> float | None:
    try:
        manifest = place.manifest(name)
    except CheckpointError:
        return None
    result = manifest.state.get("validation")
    if not isinstance(result, dict) or result.get("step") != manifest.step:
        return None
    loss = result.get("loss")
    return loss if isinstance(loss, float) and isfinite(loss) else None
