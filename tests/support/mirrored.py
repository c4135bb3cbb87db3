"""Small checkpoints and a mirror for them, without a training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megahead.checkpoints import transfer
from megahead.checkpoints.reading import RecoveryResult
from megahead.checkpoints.remote import RemoteLease, RemoteState, RemoteStorage
from megahead.checkpoints.store import RetentionRules, step_of
from megahead.checkpoints.transfer import Uploader, fetch_newer
from megahead.distributed.group import Group
from megahead.run_folder import RunFolder
from support.saved import save_checkpoint

Places = tuple[Path, str]
"""A run's folder, and where its mirror is."""


def save(run: Path, step: int, value: float | None = None, parent_step: int | None = None, keep: int = 9) -> Path:
    """RUN/checkpoints/step-N-XXXXXX with one tensor, all `value` (by default the step)."""
    tensors = {"weight/w": torch.full((500,), float(step if value is None else value))}
    return save_checkpoint(
        run / "checkpoints",
        step,
        tensors.items(),
        state={"step": step},
        config={},
        group=Group(),
        rules=RetentionRules(keep),
        parent_step=parent_step,
    )


def steps_in_mirror(url: str) -> list[int]:
    """Of the checkpoints that have a name, ascending."""
    return sorted(map(step_of, RemoteStorage.of(url).names()))


@contextmanager
def mirror(
    url: str, run: Path, mark: str = "this session\n", keep: int = 2, rules: RetentionRules | None = None
) -> Iterator[Uploader]:
    """A session's, without pauses between attempts; left when all is sent."""
    pauses, transfer.RETRY_DELAYS = transfer.RETRY_DELAYS, (0.0, 0.0, 0.0)
    try:
        run.mkdir(exist_ok=True)
        remote, folder = RemoteStorage.of(url, timeout=5), RunFolder(run)
        plain = RemoteStorage.of(url.replace("faulty:", "file:")).store
        seen = RemoteState(plain.read_if_exists("run-id") or None, plain.read_if_exists("session") or None)
        sending = Uploader(
            remote,
            folder,
            RemoteLease(remote.store, folder, mark, seen),
            replace(rules or RetentionRules(), newest=keep),
        )
        yield sending
        finish(sending)
        sending.close()
    finally:
        transfer.RETRY_DELAYS = pauses


def finish(sending: Uploader) -> None:
    """Waits until all is sent."""
    deadline = time.monotonic() + 20
    for _ in sending.wait_until_done(deadline):
        pass
    assert time.monotonic() < deadline, "not all is sent"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def newer(url: str, folder: Path, than: int = -1, group: Group = Group()) -> RecoveryResult | None:  # noqa: B008 - frozen
    """What a mirror has above a step, fetched into a run's folder."""
    return fetch_newer(than, url, RunFolder(folder), group, lambda found: None)


def fetched_step(url: str, folder: Path, than: int = -1) -> int | None:
    """The step of that; None if there is nothing."""
    found = newer(url, folder, than)
    return None if found is None or found.checkpoint is None else found.checkpoint.step
