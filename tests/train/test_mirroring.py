"""How long a session that ends waits for what it sends to its mirror."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megahead.checkpoints.transfer import Uploader
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.engine.engine import Engine
from megahead.train.faults import StopRequest, signal_handlers_restored
from megahead.train.run import pretrain
from megahead.train.session import SECONDS_AFTER_SIGNAL, upload_deadline
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text


def test_a_session_that_will_be_killed_waits_some_seconds_from_its_signal() -> None:
    with signal_handlers_restored():
        stop, before = StopRequest(), time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        after = time.monotonic()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert before + SECONDS_AFTER_SIGNAL <= upload_deadline("stopped", stop, True) <= after + SECONDS_AFTER_SIGNAL
    assert (
        upload_deadline("stopped", stop, has_launcher=False)
        == upload_deadline("finished", stop, has_launcher=True)
        == math.inf
    )


def stopped_with_mirror(group: Group, folder: Path) -> tuple[str, list[float]]:
    """How it ended, and until when it waited, in seconds from its signal."""
    update, finishing, came, waited = Engine.step, Uploader.wait_until_done, list[float](), list[float]()

    def step(engine: Engine, *arguments: Any) -> Any:
        if not came:
            os.kill(os.getpid(), signal.SIGTERM)
            came.append(time.monotonic())
        return update(engine, *arguments)

    def noted(mirror: Uploader, deadline: float = math.inf) -> Iterator[None]:
        waited.append(deadline - came[0])
        return finishing(mirror, deadline)

    Engine.step = step  # type: ignore[method-assign, assignment]
    Uploader.wait_until_done = noted  # type: ignore[method-assign]
    config = small_config(folder, {"training.remote_checkpoints": f"file://{folder}/store"})
    return pretrain(config, Launch(has_launcher=True)).ending, waited


def test_it_waits_twice_but_no_longer(tmp_path: Path) -> None:
    """For its checkpoint, and for its ending."""
    write_text(tmp_path)
    ((ending, waited),) = on_ranks(1, stopped_with_mirror, tmp_path)
    assert ending == "stopped"
    assert len(waited) == 2
    assert all(seconds <= SECONDS_AFTER_SIGNAL for seconds in waited)
