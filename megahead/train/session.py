"""A process's time in a run: what its phases share, and what it writes into the run's folder, which all ranks share."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import yaml

from megahead.checkpoint import KeepRules, run_on_all_ranks
from megahead.config import RunConfig, RunPlan, phases_of
from megahead.copies import MemoryCopies, NodeMemory, Rescue, rescue_newer
from megahead.distributed import Group, Launch, Mesh
from megahead.errors import CheckpointError
from megahead.files import write_atomically
from megahead.run_folder import RunFolder
from megahead.train.datasets import RunDatasets
from megahead.train.hold import Hold
from megahead.train.meters import Meters
from megahead.train.preemption import Ending, StopRequest
from megahead.train.state import TrainingState
from megahead.train.utilization import Utilization
from megahead.wording import counted


@dataclass(frozen=True)
class Session:
    """What the phases of a run share, from when this process takes part in it."""

    plan: RunPlan
    """Of the whole run."""

    launch: Launch
    """This rank's."""

    mesh: Mesh
    device: torch.device
    datasets: RunDatasets

    world_group: Group
    """All ranks, for CPU tensors."""

    data_group: Group
    """Data-parallel ranks, for CPU tensors."""

    @cached_property
    def meters(self) -> Meters:
        """Made when a phase is ready to train: a run that is refused before has written nothing."""
        hold = self.hold
        mesh = {
            "tensor": self.mesh.tensor_group.size,
            "data": self.mesh.data_group.size,
            "waiting": self.launch.spare_ranks,
        }
        return Meters(self.plan.config, hold=hold, mesh=mesh)

    def meters_of(self, phase: RunPlan) -> Meters:
        """The run's, which hold its speed against what a step of this phase takes."""
        self.meters.utilization = Utilization.on(self.device, phase)
        return self.meters

    @property
    def switches(self) -> list[int]:
        """Steps at which a phase ends and another begins."""
        return [phase.steps.start for phase in phases_of(self.plan.config)[1:]]

    @cached_property
    def hold(self) -> Hold | None:
        """Rank 0's on the folder, in which it has then begun to write."""
        if self.world_group.rank != 0:
            return None
        _begin(self.plan.config.folder(), self.plan.config)
        return Hold(self.plan.config.folder().holder)

    @cached_property
    def copies(self) -> MemoryCopies | None:
        """In the memory of the nodes, if the run keeps any. Made when its state is on disk, and the folder held."""
        if self.plan.config.training.copy_every is None:
            return None
        mark = self.world_group.broadcast_object("" if self.hold is None else self.hold.mark)
        self._remove_handed_over()
        return MemoryCopies(NodeMemory.of(self.plan.config.folder()), mark, self.world_group)

    def _remove_handed_over(self) -> None:
        if self.world_group.rank == 0:
            NodeMemory.shared(self.plan.config.folder()).remove()

    def describe_copies(self) -> list[tuple[str, str]]:
        """The banner's line."""
        if self.copies is None:
            return []
        nodes = self.copies.keepers.count()
        alone = "; they outlive its processes, but not the node" if nodes == 1 else ""
        every = counted(self.plan.config.training.copy_every or 0, "step")
        return [("copies", f"every {every} in the memory of {counted(nodes, 'node')}{alone}")]

    def rescue(self, than: int) -> Rescue | None:
        """A checkpoint made of what the last session has left in memory, if that is newer than step `than`."""
        training, folder = self.plan.config.training, self.plan.config.folder()
        if training.copy_every is None:
            return None
        rules = KeepRules(training.keep_every, self.switches, training.keep_best)
        return rescue_newer(than, folder, self.launch, self.world_group, training.keep_checkpoints, rules)

    def abandon(self) -> None:
        """After an error, which others must be told soon: nothing is left in memory, unless ranks will start again, and
        go on from there."""
        if "copies" in vars(self) and self.copies is not None and not self.launch.restarts:
            self.copies.close(patience=0)

    @cached_property
    def stop(self) -> StopRequest:
        """Notes signals from when it is made."""
        return StopRequest(prints=self.world_group.rank == 0)

    def end(self, ending: Ending, state: TrainingState) -> None:
        """Writes how the session ended, for scripts that restart runs; a session that was killed leaves no such
        file."""
        self.meters.close(ending, state)
        if self.world_group.rank == 0:
            content = {"ending": ending, "step": state.step, "steps": self.plan.config.training.steps}
            write_atomically(self.plan.config.folder().ending, json.dumps(content) + "\n")
        if self.hold is not None:
            self.hold.release()
        if self.copies is not None:
            self.copies.close()
            self._remove_handed_over()


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


def _begin(folder: RunFolder, config: RunConfig) -> None:
    """Writes the settings and the tokenizer, for readers of the checkpoints, and removes the last session's ending."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.ending.unlink(missing_ok=True)
    folder.config.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    if config.data.tokenizer is not None:
        shutil.copyfile(config.data.tokenizer, folder.tokenizer)


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
