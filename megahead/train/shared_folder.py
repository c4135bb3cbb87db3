"""Whether all ranks see one folder, before they write into it."""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

from megahead.checkpoint import run_on_all_ranks
from megahead.distributed import Group
from megahead.errors import CheckpointError
from megahead.run_folder import RunFolder

PATIENCE = 10.0
"""Seconds that a network file system may take to show one rank what another wrote."""


def must_be_shared(folder: RunFolder, world_group: Group) -> None:
    """CheckpointError on all ranks if one of them does not see what rank 0 writes there. Collective.

    All ranks write a checkpoint together: were the folder a different one on each node, none would be complete. What
    this check creates is removed again, so that a run that is refused later leaves nothing.
    """
    missing = [place for place in (folder.path, *folder.path.parents) if not place.exists()]
    token = world_group.all_gather_objects(secrets.token_hex(8) if world_group.rank == 0 else "")[0]
    mark = folder / f".seen-by-all-{token}"

    def write() -> None:
        folder.path.mkdir(parents=True, exist_ok=True)
        mark.touch()

    try:
        run_on_all_ranks(
            world_group, write if world_group.rank == 0 else _nothing, lambda error: _cannot_write(folder, error)
        )
        run_on_all_ranks(world_group, lambda: _see(mark, world_group.rank))
    finally:
        if world_group.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink()
                for place in missing:
                    place.rmdir()


def _see(mark: Path, rank: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not mark.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"output_dir must be one folder for all ranks, but rank {rank} does not see in {mark.parent} what rank "
                "0 wrote there; put it on a file system that all nodes share."
            )
        time.sleep(0.05)


def _cannot_write(folder: RunFolder, error: Exception) -> str:
    return f"output_dir must be a folder that can be written, but {folder} cannot be ({error}); choose another."


def _nothing() -> None:
    pass
