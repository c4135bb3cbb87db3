"""A run's log, on a disk that is full and after a machine lost its power."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

from megahead.distributed.group import Group
from megahead.errors import UserError
from megahead.train.log import RunLog, read_records
from megahead.train.progress import TrainingState
from support.on_ranks import on_ranks


def log_on_a_full_disk(group: Group, path: Path) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = RunLog(path)
    log.record(TrainingState(64, 1, step=1), {"loss": 2.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, resource.RLIM_INFINITY))
    with pytest.raises(UserError) as found:
        log.record(TrainingState(64, 1, step=2), {"loss": 1.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(found.value)


def test_a_full_disk_is_told_with_the_log_it_holds_up(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert on_ranks(1, log_on_a_full_disk, log) == [
        f"`{log}` must take what the run logs, but cannot (File too large); make room, then start the run again: its "
        "checkpoints are unharmed."
    ]
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1]


def test_lines_that_are_no_json_are_passed_over() -> None:
    lines = [b'{"step":0,"session":{"mesh":1}}\n', b'{"loss":1}\n', b'{"step":3,"session":{\0\0\n']
    assert list(read_records(lines, "session", "rollback")) == [{"step": 0, "session": {"mesh": 1}}]
