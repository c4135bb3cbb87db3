"""A process's time in a run: what its phases share, and what it writes into the run's folder."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import yaml

from megahead.checkpoints.fetch import fetch_newer
from megahead.checkpoints.format import run_long_on_all_ranks, run_on_all_ranks, run_on_first_rank
from megahead.checkpoints.memory import NodeMemory, Replicas, recover_newer, share_replicas
from megahead.checkpoints.reading import Resumed
from megahead.checkpoints.remote import Remote, RemoteLease, RemoteState
from megahead.checkpoints.store import Event, KeepRules
from megahead.checkpoints.upload import Uploads
from megahead.config.plan import RunPlan, phases_of
from megahead.config.run import RunConfig
from megahead.config.training import InitConfig
from megahead.data.tokenizer import copy_tokenizer
from megahead.distributed.group import Group, Mesh
from megahead.distributed.launch import Launch
from megahead.errors import CheckpointError
from megahead.files import write_atomically
from megahead.hf.settings import HFSettings
from megahead.remote_files import is_remote, local_file
from megahead.run_folder import RunFolder
from megahead.train.datasets import RunDatasets
from megahead.train.faults import Ending, StopRequest
from megahead.train.log import RunLogger
from megahead.train.progress import RunHistory, TrainingState
from megahead.train.saving import (
    Lease,
    checkpoint_validator,
    new_session_id,
    read_remote_state,
    resolve_resume,
    upload_deadline,
)
from megahead.train.start import ResumePoint, find_resume_point
from megahead.wording import pluralize


@dataclass
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

    uploads: Uploads | None = field(default=None, init=False)
    """Rank 0's, if the run has one, once the first phase is ready to train."""

    session_id: str = field(default_factory=new_session_id, init=False)
    """No other session's."""

    _remote_state: RemoteState = field(default=RemoteState(), init=False)
    """What the remote checkpoints were when the session began."""

    _after_an_error: ExitStack = field(default_factory=ExitStack, init=False)
    """Closes what was opened until then."""

    def starts(self, resume: str) -> Iterator[ResumePoint]:
        """What each phase goes on from: the first one from where `resume` says, the next ones from what the last one
        has left. Collective, whenever the next is asked for."""
        folder = self.plan.config.folder()
        if is_remote(resume):
            self._after_an_error.callback(self._remove_fetched)
        self._remote_state = read_remote_state(resume, self.plan.config, self.world_group)
        local = resolve_resume(resume, self.plan.config, self.datasets, self.world_group)
        yield find_resume_point(local, folder, self.world_group, (self._recover, self._fetch))
        while True:
            yield find_resume_point("auto", folder, self.world_group, (self._recover,))

    def _recover(self, than: int) -> Resumed | None:
        """A checkpoint made of what the last session has left in memory, if that is newer than step `than`."""
        training, folder = self.plan.config.training, self.plan.config.folder()
        if training.replicate_every is None:
            return None
        return recover_newer(than, folder, self.launch, self.world_group, self.keep_rules)

    def _fetch(self, than: int) -> Resumed | None:
        """The remote store's newest checkpoint, if that is newer than step `than`."""
        config, url = self.plan.config, self.plan.config.training.remote_checkpoints
        if url is None:
            return None
        return fetch_newer(
            than, url, config.folder(), self.world_group, checkpoint_validator(url, config, self.datasets)
        )

    def _remove_fetched(self) -> None:
        if self.world_group.rank == 0:
            shutil.rmtree(self.plan.config.folder().fetched_checkpoints, ignore_errors=True)

    @cached_property
    def logger(self) -> RunLogger:
        """Made when a phase is ready to train: a run that is refused before has written nothing."""
        tensor, data = self.mesh.tensor_group.size, self.mesh.data_group.size
        mesh = {"tensor": tensor, "data": data, "waiting": self.launch.spare_ranks}
        return RunLogger(self.plan.config, lease=self.lease, mesh=mesh)

    @property
    def keep_rules(self) -> KeepRules:
        """Which checkpoints are kept: also the last one of each phase."""
        training, (_, *later) = self.plan.config.training, phases_of(self.plan.config)
        ends = [phase.steps.start for phase in later]
        return KeepRules(training.keep_checkpoints, training.keep_every, ends, training.keep_best)

    @cached_property
    def lease(self) -> Lease | None:
        """Rank 0's on the folder, in which it has then begun to write."""
        if self.world_group.rank != 0:
            return None
        _begin(self.plan.config.folder(), self.plan.config)
        return Lease(self.plan.config.folder().session, self.session_id)

    @cached_property
    def copies(self) -> Replicas | None:
        """In the memory of the nodes, if the run keeps any. Made when its state is on disk, and the folder held."""
        if self.plan.config.training.replicate_every is None:
            return None
        session_id = self.world_group.broadcast_object("" if self.lease is None else self.lease.session_id)
        self._remove_handed_over()
        copies = Replicas(NodeMemory.of(self.plan.config.folder()), session_id, self.world_group)
        if not self.launch.restarts_ranks:
            self._after_an_error.callback(copies.close, timeout=0)
        return copies

    def _remove_handed_over(self) -> None:
        if self.world_group.rank == 0:
            NodeMemory.shared(self.plan.config.folder()).remove()

    def describe_copies(self) -> list[tuple[str, str]]:
        """The banner's line."""
        if self.copies is None:
            return []
        nodes = len(set(self.copies.peers.nodes))
        alone = "; they outlive its processes, but not the node" if nodes == 1 else ""
        every = pluralize(self.plan.config.training.replicate_every or 0, "step")
        return [("copies", f"every {every} in the memory of {pluralize(nodes, 'node')}{alone}")]

    def history_from(self, start: ResumePoint) -> RunHistory:
        """The checkpoints that led to what the session, or its next phase, goes on from."""
        return RunHistory.after_resume(start.checkpoint, self.plan.config.folder(), self._remote_state.names)

    def uploads_from(self, start: ResumePoint, history: RunHistory) -> Uploads | None:
        """Rank 0's uploads. The newest checkpoint of the run's own goes first, if the session begins with it."""
        url, checkpoint = self.plan.config.training.remote_checkpoints, start.checkpoint
        if self.uploads is None and url is not None and self.lease is not None:
            remote, folder = Remote.of(url), self.plan.config.folder()
            remote_lease = RemoteLease(remote.store, folder, self.lease.session_id, self._remote_state)
            self.uploads = Uploads(remote, folder, remote_lease, self.keep_rules)
            self._after_an_error.callback(self.uploads.close)
            own = checkpoint is not None and history.contains(checkpoint) and not history.orphaned_by_next_save()
            if checkpoint is not None and own and not start.came_from("mirror"):
                self.uploads.enqueue(checkpoint.folder, is_new=False)
        return self.uploads

    def _finish_uploads(self, deadline: float) -> list[Event]:
        """Waits until all is sent, or until then, and returns what happened meanwhile. Collective."""
        if self.plan.config.training.remote_checkpoints is None:
            return []
        run_long_on_all_ranks(self.world_group, iter(()) if self.uploads is None else self.uploads.finishing(deadline))
        return [] if self.uploads is None else self.uploads.events()

    def abandon(self) -> None:
        """After an error, which others must be told soon: nothing is left in memory, unless ranks will start again, and
        go on from there."""
        self._after_an_error.close()

    @cached_property
    def stop(self) -> StopRequest:
        """Notes signals from when it is made."""
        return StopRequest(prints=self.world_group.rank == 0)

    def end(self, ending: Ending, state: TrainingState) -> None:
        """Writes how the session ended, for scripts that restart runs; a session that was killed leaves no such
        file."""
        deadline = upload_deadline(ending, self.stop, self.launch.restarts_ranks)
        for event in self._finish_uploads(deadline):
            self.logger.log_event(event.record, event.fields, state, event.message)
        self.logger.close(ending, state)
        if self.world_group.rank == 0:
            content = {"ending": ending, "step": state.step, "steps": self.plan.config.training.steps}
            write_atomically(self.plan.config.folder().ending, json.dumps(content) + "\n")
        if self.lease is not None:
            self.lease.release()
        if self.copies is not None:
            self.copies.close()
            self._remove_handed_over()
        self._remove_fetched()
        if self.uploads is not None:
            self.uploads.enqueue_files()
            self.uploads.close()
        for message in [event.message for event in self._finish_uploads(deadline) if event.message]:
            print(message, flush=True)


def _begin(folder: RunFolder, config: RunConfig) -> None:
    """Writes the settings and the tokenizer, for readers of the checkpoints, and removes the last session's ending."""
    folder.path.mkdir(parents=True, exist_ok=True)
    if config.data.tokenizer is not None:
        source = Path(local_file(config.data.tokenizer))
        if source.resolve() != folder.tokenizer.resolve():  # a run may go on with its own copy
            copy_tokenizer(source, folder)
    if config.init is not None and not folder.published_files.is_file():
        _keep_published(folder, config.init)
    folder.ending.unlink(missing_ok=True)
    folder.config.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def _keep_published(folder: RunFolder, init: InitConfig) -> None:
    """The settings of the Hugging Face folder that the weights come from go along, for exports; not to another
    vocabulary."""
    kept = None
    if init.mode != "table" and init.from_hf is not None:
        kept = HFSettings.from_folder(Path(init.from_hf))
    elif init.mode != "table" and init.from_checkpoint is not None and not is_remote(init.from_checkpoint):
        kept = HFSettings.from_run(RunFolder.of(Path(init.from_checkpoint)))
    if kept is not None and kept.files:
        kept.save(folder)


@contextlib.contextmanager
def hand_over_replicas(config: RunConfig, launch: Launch) -> Iterator[None]:
    """A spare rank waits in the block. Before it, replicas on its node are put where the training ranks find them;
    after it none is left there."""
    replicates = config.training.replicate_every is not None
    if replicates:
        share_replicas(config.folder(), launch)
    yield
    if replicates:
        NodeMemory.of(config.folder()).remove()


# Whether all ranks see one folder, before they write into it.


TIMEOUT_SECONDS = 10.0
"""Seconds that a network file system may take to show one rank what another wrote."""


def require_shared_folder(folder: RunFolder, world_group: Group) -> None:
    """CheckpointError on all ranks if one of them does not see what rank 0 writes there. Collective.

    All ranks write a checkpoint together: were the folder a different one on each node, none would be complete. What
    this check creates is removed again, so that a run that is refused later leaves nothing.
    """
    missing = [place for place in (folder.path, *folder.path.parents) if not place.exists()]
    marker = folder / f".seen-by-all-{world_group.broadcast_object(secrets.token_hex(8))}"

    def write() -> None:
        folder.path.mkdir(parents=True, exist_ok=True)
        marker.touch()

    def cannot_write(error: Exception) -> str:
        return f"output_dir must be a folder that can be written, but {folder} cannot be ({error}); choose another."

    try:
        run_on_first_rank(world_group, write, cannot_write)
        run_on_all_ranks(world_group, lambda: _see(marker, world_group.rank))
    finally:
        if world_group.rank == 0:
            with contextlib.suppress(OSError):
                marker.unlink()
                for place in missing:
                    place.rmdir()


def _see(marker: Path, rank: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not marker.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"output_dir must be one folder for all ranks, but rank {rank} does not see in {marker.parent} what "
                "rank 0 wrote there; put it on a file system that all nodes share."
            )
        time.sleep(0.05)
