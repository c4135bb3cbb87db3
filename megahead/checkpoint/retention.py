"""Which checkpoints are kept: the last few that led to the newest one, and those that `KeepRules` name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from megahead.checkpoint.folders import point_to, remove, set_aside, step_folder, step_of, steps_in
from megahead.checkpoint.manifest import Manifest
from megahead.errors import CheckpointError


@dataclass(frozen=True)
class KeepRules:
    """Checkpoints that are kept in addition to the newest ones."""

    every: int | None = None
    """Those whose step is a multiple of this."""

    steps: Collection[int] = ()
    """Those of these steps."""

    best: int = 0
    """How many of those with the lowest held-out loss (`validation` in their state, if evaluated at their own step)."""

    def holds(self, step: int) -> bool:
        """Whether a checkpoint of this step is kept, whatever its loss."""
        return step in self.steps or (self.every is not None and step % self.every == 0)


KEEP_NO_OTHERS = KeepRules()


def abandon_after(final: Path, parent_step: int) -> None:
    """Sets aside all checkpoints above `parent_step` (that of the checkpoint which `final` continues) except `final`.

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
    set_aside(folder for folder in reversed(above) if folder != final)


def retain(root: Path, newest: Path, keep: int, keep_rules: KeepRules = KEEP_NO_OTHERS) -> None:
    """Removes all checkpoints except `newest` (just written), the `keep - 1` highest other steps, and those that
    `keep_rules` keeps."""
    others = [folder for folder in steps_in(root) if folder != newest]
    best = _best([newest, *others], keep_rules.best)
    for folder in others[keep - 1 :]:
        if folder not in best and not keep_rules.holds(step_of(folder)):
            remove(folder)


def _best(folders: Iterable[Path], count: int) -> set[Path]:
    """The `count` folders with the lowest held-out loss; reads every manifest unless `count` is 0."""
    if not count:
        return set()
    losses = {folder: loss for folder in folders if (loss := _held_out_loss(folder)) is not None}
    return set(sorted(losses, key=losses.__getitem__)[:count])


def _held_out_loss(folder: Path) -> float | None:
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return None
    result = manifest.state.get("validation")
    if not isinstance(result, dict) or result.get("step") != manifest.step:
        return None
    loss = result.get("loss")
    return loss if isinstance(loss, float) and isfinite(loss) else None
