"""Far checkpoints in this machine's cache, for commands."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megahead.far import folder_for
from megahead.mirror.far_run import CHECKPOINTS, FarRun
from megahead.mirror.fetching import fetch_named
from megahead.run_folder import RunFolder


def fetch_to_cache(url: str) -> Path:
    """What `fetch_named` does, into a folder of this machine's cache, with the run's tokenizer and log; one process
    after the other."""
    run = RunFolder(folder_for(url))
    with _in_turn(run):
        folder = fetch_named(url, run)
        FarRun(_run_of(url)).take(run.tokenizer_json, run.tokenizer_model, run.published, run.metrics)
    return folder


def _run_of(url: str) -> str:
    """The address of a run, of whose folder of checkpoints, or of one of them, `url` is, if not of the run."""
    return re.sub(rf"/{CHECKPOINTS}(/step-\d+)?/*$", "", url)


@contextmanager
def _in_turn(run: RunFolder) -> Iterator[None]:
    """Waits for other processes of this machine that fetch into the same folder: each would remove what another has
    half fetched."""
    run.path.mkdir(parents=True, exist_ok=True)
    with (run / "turn").open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
