"""Names, ancestry and retention of checkpoints in every storage: disk, memory or remote.

A name is never reused: `step-00001980-3f2a91` has six random digits. Each manifest names its ancestors. `latest`, which
is written last, names the newest checkpoint. The history of a run is the newest checkpoint and its ancestors. All other
checkpoints are orphaned: the run rolled back past them, or crashed before it wrote `latest`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import PurePath
from typing import Any, Protocol

from megahead.checkpoints.format import Manifest
from megahead.errors import CheckpointError

# Names of checkpoints. Names of earlier versions have no random digits, and may end in `.replaced`.


_NAME = re.compile(r"step-(\d{8,})(-[0-9a-f]{6})?(\.replaced)?")


def new_checkpoint_name(step: int) -> str:
    """A new unique name."""
    return f"step-{step:08d}-{secrets.token_hex(3)}"


def is_checkpoint_name(name: str) -> bool:
    """Whether `name` is a checkpoint's."""
    return _NAME.fullmatch(name) is not None


def step_of(name: str | PurePath) -> int:
    """The step in a checkpoint's name, or in its folder's."""
    match = _NAME.fullmatch(PurePath(name).name)
    if match is None:
        raise ValueError(f"{name} is not the name of a checkpoint")
    return int(match[1])


def without_suffix(name: str) -> str:
    """A checkpoint's name without its random digits; any other name unchanged."""
    match = _NAME.fullmatch(name)
    return f"step-{match[1]}" if match and match[2] else name


def highest_step_first(names: Iterable[str]) -> list[str]:
    """Sorted by step, the highest first; `.replaced` follows the other folder of its step."""
    return sorted(names, key=lambda name: (step_of(name), not name.endswith(".replaced"), name), reverse=True)


def _is_legacy_name(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and match[2] is None


@dataclass(frozen=True)
class Latest:
    """The content of `latest`: a name per line, the newest checkpoint first."""

    name: str | None = None

    ancestors: tuple[str, ...] = ()
    """Its ancestors, in case its manifest is damaged or missing; empty if an earlier version wrote it."""

    @staticmethod
    def read(text: str) -> Latest:
        """Parses the content of the file."""
        name, *ancestors = text.split() or [""]
        return Latest(name, tuple(filter(is_checkpoint_name, ancestors))) if is_checkpoint_name(name) else Latest()

    def text(self) -> str:
        """The content of the file."""
        return "".join(f"{name}\n" for name in (self.name, *self.ancestors))


class Storage(Protocol):
    """A storage of checkpoints: a disk, a node's memory, a remote store."""

    def names(self) -> list[str]:
        """All checkpoints, also damaged ones, in any order."""

    def manifest(self, name: str) -> Manifest:
        """The manifest; CheckpointError if it is damaged or missing."""

    @property
    def latest(self) -> Latest:
        """The `latest` file; without a name if it is missing or malformed."""

    def write_latest(self, latest: Latest) -> None:
        """Writes the `latest` file."""

    def remove(self, name: str) -> None:
        """Removes a checkpoint: first from `names()`, then its files. A crash between the two leaves no partial one."""

    def manifest_if_valid(self, name: str) -> Manifest | None:
        """The manifest; None if it is damaged or missing."""
        with suppress(CheckpointError):
            return self.manifest(name)
        return None

    def history(self) -> list[str]:
        """The newest checkpoint and those of its ancestors that exist, the newest first.

        If the newest is damaged or missing, `latest` names its ancestors. Without `latest` the newest is the one with
        the highest step that is not orphaned. Damaged ones that would be the newest come first.
        """
        existing = highest_step_first(self.names())
        damaged = list[str]()
        for name in self._possible_newest(existing):
            manifest = self.manifest_if_valid(name)
            if manifest is not None:
                ancestors = ancestors_among(ancestors_of(name, manifest), existing)
                return [*damaged, name, *(each for each in ancestors if each != name)]
            damaged.append(name)
        return damaged

    def _possible_newest(self, existing: Sequence[str]) -> Iterator[str]:
        """Checkpoints that may be the newest, the most likely first."""
        latest = self.latest
        if latest.name in existing:
            yield str(latest.name)
        if latest.ancestors:
            yield from (name for name in latest.ancestors if name in existing)
            yield from (
                name for name in existing if name not in latest.ancestors and is_ancestor(name, latest.ancestors)
            )
            return
        manifests = filter(None, map(self.manifest_if_valid, existing))
        orphaned = {name for manifest in manifests for name in manifest.orphaned}
        yield from (name for name in existing if name != latest.name and name not in orphaned)

    def orphans(self) -> list[str]:
        """Checkpoints outside the history, the highest step first."""
        ancestors = self.history()
        return [name for name in highest_step_first(self.names()) if name not in ancestors]

    def retain(self, rules: RetentionRules) -> None:
        """Removes checkpoints of the history by `rules`; orphans stay. Reads manifests only for `rules.best`."""
        names, newest_by_step = self.history(), dict[int, str]()
        for name in names:
            newest_by_step.setdefault(step_of(name), name)
        unique = [*newest_by_step.values()]
        best = self._best(unique, rules.best)
        surplus = [name for name in unique[rules.newest :] if name not in best and not rules.keeps(name)]
        older_saves = [name for name in names if name not in unique]  # of a step; its newest has the evaluation
        for name in [*surplus, *(name for name in older_saves if name not in rules.in_use())]:
            self.remove(name)

    def _best(self, names: Iterable[str], count: int) -> list[str]:
        """The `count` with the lowest losses on each validation dataset: those on different ones do not compare."""
        losses_by_data = dict[str, dict[str, float]]()
        for name in names if count else ():
            if (held_out := self._held_out_loss(name)) is not None:
                data, loss = held_out
                losses_by_data.setdefault(data, {})[name] = loss
        return [name for losses in losses_by_data.values() for name in sorted(losses, key=losses.__getitem__)[:count]]

    def _held_out_loss(self, name: str) -> tuple[str, float] | None:
        """The validation data (empty in checkpoints of earlier versions) and the loss of an evaluation at its step."""
        manifest = self.manifest_if_valid(name)
        result = None if manifest is None else manifest.state.get("validation")
        if manifest is None or not isinstance(result, dict) or result.get("step") != manifest.step:
            return None
        loss = result.get("loss")
        return (str(result.get("data", "")), loss) if isinstance(loss, float) and isfinite(loss) else None


def is_ancestor(name: str, ancestors: Sequence[str]) -> bool:
    """Whether `name` is one of `ancestors`. Among checkpoints of earlier versions, each is also an ancestor of all with
    higher steps."""
    return name in ancestors or (
        _is_legacy_name(name) and step_of(name) <= max(map(step_of, filter(_is_legacy_name, ancestors)), default=-1)
    )


def ancestors_among(ancestors: Sequence[str], existing: Iterable[str]) -> list[str]:
    """The ancestors among some checkpoints, the newest first."""
    distance_by_name = {name: distance for distance, name in enumerate(ancestors)}
    among = [name for name in highest_step_first(existing) if is_ancestor(name, ancestors)]
    return sorted(among, key=lambda name: distance_by_name.get(name, len(distance_by_name)))


def ancestors_of(name: str, manifest: Manifest) -> tuple[str, ...]:
    """The ancestors of the checkpoint `name`; for one of an earlier version the name itself (see `is_ancestor`)."""
    return (name,) if _is_legacy_name(name) else manifest.ancestors


@dataclass
class Ancestry:
    """The ancestors of a run's current weights. Checkpoints that a rollback discarded are not among them."""

    ancestors: tuple[str, ...] = ()
    """The checkpoint that the run last saved or resumed, and its ancestors, the newest first."""

    orphaned: tuple[str, ...] = ()
    """Other known checkpoints."""

    @staticmethod
    def of(name: str | None, manifest: Manifest | None, *existing: Iterable[str]) -> Ancestry:
        """The ancestry of a session that resumes from the checkpoint `name`, or from none. `existing`: names."""
        ancestors: tuple[str, ...] = ()
        orphaned: set[str] = set()
        if name is not None and manifest is not None:
            ancestors, orphaned = tuple(dict.fromkeys((name, *ancestors_of(name, manifest)))), {*manifest.orphaned}
        orphaned |= {each for names in existing for each in names}
        return Ancestry(ancestors, tuple(sorted(each for each in orphaned if not is_ancestor(each, ancestors))))

    @property
    def newest(self) -> str | None:
        """The checkpoint that the run last saved or resumed; None if there is none yet."""
        return self.ancestors[0] if self.ancestors else None

    @property
    def step(self) -> int:
        """The step of `newest`; -1 if there is none."""
        return step_of(self.ancestors[0]) if self.ancestors else -1

    def add(self, name: str) -> None:
        """The run has saved the checkpoint `name`."""
        self.ancestors = (name, *self.ancestors)

    def roll_back(self, name: str) -> None:
        """The run rolled back to the checkpoint `name`: later ones are orphaned."""
        index = self.ancestors.index(name) if name in self.ancestors else len(self.ancestors)
        self.orphaned = tuple(sorted({*self.orphaned, *self.ancestors[:index]}))
        self.ancestors = self.ancestors[index:] or (name,)

    def supersedes(self, name: str) -> bool:
        """Whether the run has continued from that checkpoint, or rolled back past it."""
        return is_ancestor(name, self.ancestors) or name in self.orphaned


@dataclass(frozen=True)
class Event:
    """An event of a checkpoint in a storage."""

    fields: dict[str, Any]
    """For the log."""

    message: str | None = None
    """For the console, if something is wrong."""

    record: str = "mirror"
    """The key in the log: `mirror` for the remote store, `copy` for memory."""


@dataclass(frozen=True)
class RetentionRules:
    """Which checkpoints of a history are kept."""

    newest: int = 1
    """How many of the newest."""

    every: int | None = None
    """Also those whose step is a multiple of this."""

    steps: Collection[int] = ()
    """Also those at these steps."""

    best: int = 0
    """Also this many with the lowest held-out loss on each dataset (`validation` in their state, if evaluated at their
    own step)."""

    in_use: Callable[[], Collection[str]] = frozenset
    """Names of checkpoints that must stay for now, since they are queued for an upload or being uploaded."""

    def keeps(self, name: str) -> bool:
        """Whether a checkpoint is kept regardless of its age and loss."""
        step = step_of(name)
        return step in self.steps or name in self.in_use() or (self.every is not None and step % self.every == 0)
