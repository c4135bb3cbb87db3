"""A session of a run (one launch): the objects that its phases share, and the files that it writes."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from pathlib import Path

import torch
import yaml

from megahead.checkpoints.format import run_generator_on_all_ranks, run_on_all_ranks, run_on_first_rank
from megahead.checkpoints.memory import NodeMemory, ReplicaWriter, recover_replica, share_replicas
from megahead.checkpoints.reading import Checkpoint, RecoveryResult
from megahead.checkpoints.remote import RemoteLease, RemoteState, RemoteStorage, read_state, retry_seconds
from megahead.checkpoints.store import Event, RetentionRules
from megahead.checkpoints.transfer import Uploader, fetch_checkpoint, fetch_newer, read_small_files
from megahead.config.plan import RunPlan, phases_of
from megahead.config.run import RunConfig
from megahead.config.training import InitConfig
from megahead.data.tokenizer import copy_tokenizer
from megahead.distributed.group import Group, Mesh
from megahead.distributed.launch import Launch
from megahead.distributed.watchdog import is_communication_error
from megahead.errors import CheckpointError
from megahead.files import VISIBLE_SECONDS, wait_until_visible, write_atomically
from megahead.hf.settings import HFSettings
from megahead.remote_files import is_below, is_remote, local_file
from megahead.run_folder import RunFolder
from megahead.train.datasets import RunDatasets, data_fingerprints, require_same_run
from megahead.train.faults import Ending, StopRequest
from megahead.train.log import RunLogger
from megahead.train.progress import RunHistory, TrainingState
from megahead.train.saving import Lease, new_session_id
from megahead.train.start import ResumePoint, find_resume_point, has_saved
from megahead.wording import pluralize, print_line


@dataclass
class Session:
    """One launch of a run on this rank: the objects that its phases share."""

    plan: RunPlan
    """The plan of the whole run; a phase has its own config."""

    launch: Launch
    mesh: Mesh
    device: torch.device
    datasets: RunDatasets

    world_group: Group
    """All ranks, for CPU tensors."""

    data_group: Group
    """Data-parallel ranks, for CPU tensors."""

    uploads: Uploader | None = field(default=None, init=False)
    """Rank 0's uploads, if enabled; set when the first phase is ready to train."""

    session_id: str = field(default_factory=new_session_id, init=False)

    _remote_state: RemoteState = field(default=RemoteState(), init=False)
    """The remote checkpoints at the start of the session."""

    _error_callbacks: ExitStack = field(default_factory=ExitStack, init=False)
    """Closes and removes resources after an error."""

    def resume_points(self, resume: str) -> Iterator[ResumePoint]:
        """Yields the resume point of each phase: the first by `resume`, then the last checkpoint of the previous phase.
        Each `next` is collective."""
        folder, url = self.plan.config.folder(), self.plan.config.training.remote_checkpoints
        launch_id = self.launch.launch_id
        if resume != "auto" and run_on_first_rank(self.world_group, lambda: has_saved(launch_id, folder)):
            if self.world_group.rank == 0:
                print_line(f"--resume {resume} was for the first start: this launch ({launch_id}) has saved since")
            resume = "auto"
        if is_remote(resume):
            self._error_callbacks.callback(self._remove_fetched)
        if url is not None:
            timeout = retry_seconds(self.world_group)
            self._remote_state = run_on_first_rank(
                self.world_group, lambda: read_state(RemoteStorage.of(url, timeout), folder, resume)
            )
        local = resolve_resume(resume, self.plan.config, self.datasets, self.world_group)
        yield find_resume_point(local, folder, self.world_group, (self._recover, self._fetch))
        while True:
            yield find_resume_point("auto", folder, self.world_group, (partial(self._recover, wait=False),))

    def _recover(self, newer_than: int, *, wait: bool = True) -> RecoveryResult | None:
        """Writes a checkpoint from the last session's replicas in memory, if they are newer than step `newer_than`.
        `wait`: whether to wait for the replicas that spare ranks, which do not train, copy to the run's folder before
        the first phase."""
        training, folder = self.plan.config.training, self.plan.config.folder()
        if training.replicate_every is None:
            return None
        launch = self.launch if wait else replace(self.launch, spare_ranks=0)
        return recover_replica(newer_than, folder, launch, self.world_group, self.retention_rules)

    def _fetch(self, newer_than: int) -> RecoveryResult | None:
        """Fetches the remote store's newest checkpoint, if it is newer than step `newer_than`."""
        config, url = self.plan.config, self.plan.config.training.remote_checkpoints
        if url is None:
            return None
        validate = checkpoint_validator(url, config, self.datasets)
        return fetch_newer(newer_than, url, config.folder(), self.world_group, validate)

    def _remove_fetched(self) -> None:
        if self.world_group.rank == 0:
            shutil.rmtree(self.plan.config.folder().fetched_checkpoints, ignore_errors=True)

    @cached_property
    def logger(self) -> RunLogger:
        """Created when a phase is ready to train, so that a run with an earlier error writes nothing."""
        tensor, data = self.mesh.tensor_group.size, self.mesh.data_group.size
        mesh = {"tensor": tensor, "data": data, "waiting": self.launch.spare_ranks}
        return RunLogger(self.plan.config, lease=self.lease, mesh=mesh)

    @property
    def retention_rules(self) -> RetentionRules:
        """Which checkpoints are kept, including the last one of each phase."""
        training, (_, *later_phases) = self.plan.config.training, phases_of(self.plan.config)
        phase_ends = [phase.steps.start for phase in later_phases]
        return RetentionRules(training.keep_checkpoints, training.keep_every, phase_ends, training.keep_best)

    @cached_property
    def lease(self) -> Lease | None:
        """Rank 0's lease on the folder; writes the folder's first files."""
        if self.world_group.rank != 0:
            return None
        _write_run_files(self.plan.config.folder(), self.plan.config)
        return Lease(self.plan.config.folder().session, self.session_id)

    @cached_property
    def replicas(self) -> ReplicaWriter | None:
        """Replicas of the run's state in the memory of the nodes, if enabled. Created after the resumed state is on
        disk and the lease is taken: creating it removes the replicas that spare ranks copied to the run's folder."""
        if self.plan.config.training.replicate_every is None:
            return None
        session_id = self.world_group.broadcast_object("" if self.lease is None else self.lease.session_id)
        self._remove_shared_replicas()
        replicas = ReplicaWriter(NodeMemory.of(self.plan.config.folder()), session_id, self.world_group)
        if not self.launch.restarts_ranks:
            self._error_callbacks.push(partial(_close_unless_ranks_are_lost, replicas))
        return replicas

    def _remove_shared_replicas(self) -> None:
        if self.world_group.rank == 0:
            NodeMemory.on_shared_disk(self.plan.config.folder()).remove()

    def describe_replicas(self) -> list[tuple[str, str]]:
        """The line about replicas in the banner (the lines printed at the start of the session)."""
        if self.replicas is None:
            return []
        nodes = len(set(self.replicas.peers.nodes))
        note = "; they outlive its processes, but not the node" if nodes == 1 else ""
        interval = pluralize(self.plan.config.training.replicate_every or 0, "step")
        return [("copies", f"every {interval} in the memory of {pluralize(nodes, 'node')}{note}")]

    def history_from(self, start: ResumePoint) -> RunHistory:
        """The history of the weights at `start`."""
        return RunHistory.after_resume(start.checkpoint, self.plan.config.folder(), self._remote_state.names)

    def start_uploads(self, start: ResumePoint, history: RunHistory) -> Uploader | None:
        """Rank 0's uploads, if enabled. At first enqueues the checkpoint at `start`, if it is the run's newest."""
        url, checkpoint = self.plan.config.training.remote_checkpoints, start.checkpoint
        if self.uploads is None and url is not None and self.lease is not None:
            remote, folder = RemoteStorage.of(url), self.plan.config.folder()
            remote_lease = RemoteLease(remote.store, folder, self.lease.session_id, self._remote_state)
            self.uploads = Uploader(remote, folder, remote_lease, self.retention_rules)
            self._error_callbacks.callback(self.uploads.close)
            is_local = checkpoint is not None and history.contains(checkpoint) and not start.is_from("mirror")
            if checkpoint is not None and is_local and not history.orphaned_by_next_save():
                self.uploads.enqueue(checkpoint.folder, is_new=False)
        return self.uploads

    def _finish_uploads(self, deadline: float) -> list[Event]:
        """Waits for the uploads until `deadline`, and returns their events. Collective."""
        if self.plan.config.training.remote_checkpoints is None:
            return []
        waiting = iter(()) if self.uploads is None else self.uploads.wait_until_done(deadline)
        run_generator_on_all_ranks(self.world_group, waiting)
        return [] if self.uploads is None else self.uploads.events()

    def close_after_error(self, error: BaseException) -> None:
        """Releases resources without waiting, so that the error is reported soon. Replicas stay in memory if ranks
        restart and resume from them, and if other ranks are lost."""
        self._error_callbacks.__exit__(type(error), error, None)

    @cached_property
    def stop(self) -> StopRequest:
        """Records signals from its creation on."""
        return StopRequest(prints=self.world_group.rank == 0)

    def end(self, ending: Ending, state: TrainingState) -> None:
        """Finishes uploads and the log, writes `ending.json` for scripts that restart runs, and releases resources."""
        deadline = upload_deadline(ending, self.stop, self.launch.has_launcher)
        for event in self._finish_uploads(deadline):
            self.logger.log_event(event.record, event.fields, state, event.message)
        run_on_all_ranks(self.world_group, self.logger.check_lease)
        self.logger.close(ending, state)
        if self.world_group.rank == 0:
            content = {"ending": ending, "step": state.step, "steps": self.plan.config.training.steps}
            write_atomically(self.plan.config.folder().session_end, json.dumps(content) + "\n")
        if self.lease is not None:
            self.lease.release()
        if self.replicas is not None:
            self.replicas.close()
            self._remove_shared_replicas()
        self._remove_fetched()
        if self.uploads is not None:
            self.uploads.enqueue_files()
            self.uploads.close()
        for message in [event.message for event in self._finish_uploads(deadline) if event.message]:
            print_line(message)


# Remote checkpoints: fetching them at the start of a session, and the time limit of uploads.


SECONDS_AFTER_SIGNAL = 20.0
"""How long a session may wait for its uploads after a signal from a launcher, which kills ranks after 30 s or more. The
next session uploads the rest."""


def resolve_resume(resume: str, config: RunConfig, datasets: RunDatasets, world_group: Group) -> str:
    """Returns `resume`, with a checkpoint URL replaced by the local folder to which it is fetched. A checkpoint of the
    run's own remote store is fetched into the run's checkpoints. Collective; CheckpointError if it is of another run,
    or the store cannot be read."""
    if not is_remote(resume):
        return resume
    url, folder = config.training.remote_checkpoints, config.folder()
    validate = checkpoint_validator(resume, config, datasets)
    if url is None or not is_below(resume, url):
        return str(fetch_checkpoint(resume, RunFolder(folder.fetched_checkpoints), world_group, validate))
    log = [] if folder.metrics.exists() else [folder.metrics]
    files = partial(read_small_files, url, world_group, *log, folder.run_id)
    return str(fetch_checkpoint(resume, folder, world_group, validate, files))


def checkpoint_validator(url: str, config: RunConfig, datasets: RunDatasets) -> Callable[[Checkpoint], None]:
    """A function that raises CheckpointError if the run cannot resume from a checkpoint at `url`."""
    fingerprints = data_fingerprints(config, datasets)

    def validate(checkpoint: Checkpoint) -> None:
        try:
            require_same_run(checkpoint, config, fingerprints)
        except CheckpointError as error:
            source = f"{url} (step {checkpoint.step:,})"
            raise CheckpointError(str(error).replace(str(checkpoint.folder), source)) from None

    return validate


def _close_unless_ranks_are_lost(replicas: ReplicaWriter, _: object, error: BaseException, *trace: object) -> None:
    if not is_communication_error(error):
        replicas.close(timeout=0)


def upload_deadline(ending: Ending, stop: StopRequest, has_launcher: bool) -> float:
    """Time on the monotonic clock until which a session that ends may wait for its uploads."""
    if ending != "stopped" or not has_launcher:
        return inf
    return (stop.received_at or time.monotonic()) + SECONDS_AFTER_SIGNAL


# Files in the run's folder.


def _write_run_files(folder: RunFolder, config: RunConfig) -> None:
    """Writes the config and the tokenizer to `folder`, and removes the last session's `ending.json`."""
    folder.path.mkdir(parents=True, exist_ok=True)
    if config.data.tokenizer is not None:
        source = Path(local_file(config.data.tokenizer))
        if source.resolve() != folder.tokenizer.resolve():  # the config may name the run's own copy
            copy_tokenizer(source, folder)
    if config.init is not None and not folder.source_hf_files.is_file():
        _copy_source_hf_files(folder, config.init)
    folder.session_end.unlink(missing_ok=True)
    write_atomically(folder.config, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def _copy_source_hf_files(folder: RunFolder, init: InitConfig) -> None:
    """Keeps for exports the files beside the weights of the Hugging Face folder that the run begins from; none if only
    the embedding is trained, for a new vocabulary (`init.mode: table`)."""
    hf_settings = None
    if init.mode != "table" and init.from_hf is not None:
        hf_settings = HFSettings.from_folder(Path(init.from_hf))
    elif init.mode != "table" and init.from_checkpoint is not None and not is_remote(init.from_checkpoint):
        hf_settings = HFSettings.from_run(RunFolder.of(Path(init.from_checkpoint)))
    if hf_settings is not None and hf_settings.files:
        hf_settings.save(folder)


@contextlib.contextmanager
def hand_over_replicas(config: RunConfig, launch: Launch) -> Iterator[None]:
    """For a spare rank: copies the replicas on its node to the run folder for the
    training ranks; removes those on its node after the block, in which it waits."""
    if config.training.replicate_every is not None:
        share_replicas(config.folder(), launch)
    yield
    remove_replicas(config)


def remove_replicas(config: RunConfig) -> None:
    """Removes the run's replicas on this node, if it keeps any."""
    if config.training.replicate_every is not None:
        NodeMemory.of(config.folder()).remove()


def require_shared_folder(folder: RunFolder, world_group: Group) -> None:
    """CheckpointError on all ranks if one of them does not see a file that rank 0 writes to `folder`. Collective. With
    a different folder on each node no checkpoint would be complete. Removes what it has created, so that a run with a
    later error leaves nothing."""
    new_folders: list[Path] = []
    marker = folder / f".seen-by-all-{world_group.broadcast_object(secrets.token_hex(8))}"

    def write() -> None:
        new_folders.extend(path for path in (folder.path, *folder.path.parents) if not path.exists())
        folder.path.mkdir(parents=True, exist_ok=True)
        marker.touch()

    def cannot_write(error: Exception) -> str:
        return f"output_dir must be a folder that can be written, but {folder} cannot be ({error}); choose another."

    try:
        run_on_first_rank(world_group, write, cannot_write)
        run_on_all_ranks(world_group, lambda: _wait_until_visible(marker, world_group.rank))
    finally:
        if world_group.rank == 0:
            with contextlib.suppress(OSError):
                marker.unlink(missing_ok=True)
                for path in new_folders:
                    path.rmdir()


def _wait_until_visible(marker: Path, rank: int) -> None:
    if not wait_until_visible(marker, VISIBLE_SECONDS):
        raise CheckpointError(
            f"output_dir must be one folder for all ranks, but rank {rank} does not see in {marker.parent} what "
            "rank 0 wrote there; put it on a file system that all nodes share."
        )
