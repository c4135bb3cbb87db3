"""Which checkpoints are kept: the last few that led to the newest one, and those that `KeepRules` name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TypeVar

from megahead.checkpoint.folders import point_to, remove, set_aside, step_folder, step_of, steps_in
from megahead.checkpoint.manifest import Manifest
from megahead.errors import CheckpointError

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class KeepRules:
    """Checkpoints that are kept in addition to the newest ones."""

    every: int | None = None
    """Those whose step is a multiple of this."""

    steps: Collection[int] = ()
    """Those of these steps."""

    best: int = 0
    """How many of those with the lowest held-out loss (`validation` in their state, if evaluated at their own step)."""

    read_now: Collection[int] = ()
    """Those of these steps, which change meanwhile: something reads them just now."""

    def holds(self, step: int) -> bool:
        """Whether a checkpoint of this step is kept, whatever its loss."""
        return step in self.steps or step in self.read_now or (self.every is not None and step % self.every == 0)


KEEP_NO_OTHERS = KeepRules()


def abandon_after(final: Path, parent_step: int) -> None:
    """Sets aside all checkpoints above `parent_step` (that of the checkpoint which `final` continues), also one in the
    place of `final`.

    Called before `final` appears. Points `latest` to the parent first, so that after a crash in between no abandoned
    checkpoint is resumed.
    """
    root = final.parent
    above, origin = (
        [folder for folder in steps_in(root) if step_of(folder) > parent_step],
        step_folder(root, parent_step),
    )
    if above and origin.is_dir():
        point_to(origin)
    set_aside(reversed(above))


def retain(root: Path, newest: Path, keep: int, keep_rules: KeepRules = KEEP_NO_OTHERS) -> None:
    """Removes all checkpoints except `newest` (just written), the `keep - 1` highest other steps, and those that
    `keep_rules` keeps."""
    others = [folder for folder in steps_in(root) if folder != newest]
    for folder in surplus(newest, others, keep, keep_rules, step_of, Manifest.read):
        remove(folder)


def surplus(
    newest: K,
    others: Sequence[K],
    keep: int,
    keep_rules: KeepRules,
    step_of: Callable[[K], int],
    read: Callable[[K], Manifest],
) -> list[K]:
    """Those of the `others` (highest step first) that need not be kept beside `newest`. `read` may raise a
    CheckpointError, and is called for all of them if `keep_rules` keep the best, else for none."""
    best = _best([newest, *others], keep_rules.best, read)
    return [each for each in others[keep - 1 :] if each not in best and not keep_rules.holds(step_of(each))]


def _best(checkpoints: Iterable[K], count: int, read: Callable[[K], Manifest]) -> set[K]:
    """The `count` checkpoints with the lowest held-out loss."""
    if not count:
        return set()
    losses = {each: loss for each in checkpoints if (loss := _held_out_loss(partial(read, each))) is not None}
    return set(sorted(losses, key=losses.__getitem__)[:count])


def _held_out_loss(read: Callable[[], Manifest]) -> float | None:
    try:
        manifest = read()
    except CheckpointError:
        return None
    result = manifest.state.get("validation")
    if not isinstance(result, dict) or result.get("step") != manifest.step:
        return None
    loss = result.get("loss")
    return loss if isinstance(loss, float) and isfinite(loss) else None
