"""An agent that ends by an error of its own does not end the run for others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch import distributed
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from megahead.distributed.agent import keep_rendezvous_open, run_agent, share_launch_id
from megahead.errors import UserError
from support.forked import forked


@pytest.fixture
def meeting() -> tuple[str, object]:
    """Where agents meet, on a machine that trains nothing."""
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    return f"127.0.0.1:{store.port}", store


def agent(place: str, rank: Callable[[], object], error: Exception | None = None) -> str:
    """How an agent on that meeting place ends; it fails with `error` if that is given."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=1,
        run_id="run",
        rdzv_backend="c10d",
        rdzv_endpoint=place,
        rdzv_configs={"is_host": False, "last_call_timeout": 1, "keep_alive_interval": 1},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="fork",
    )

    def failing(*_: object) -> None:
        assert error is not None
        raise error

    keep_rendezvous_open()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if error is not None:
        SimpleElasticAgent._assign_worker_ranks = failing  # type: ignore[method-assign]
    try:
        return str(launch_agent(config, rank, []))
    except Exception as ended:
        return type(ended).__name__


def one() -> int:
    return 1


def failed() -> None:
    raise ValueError


def test_it_leaves_the_meeting_open(meeting: tuple[str, object]) -> None:
    """As where another node falls silent while they begin."""
    lost = distributed.DistStoreError("wait timeout after 60000ms")  # type: ignore[attr-defined]
    assert forked(agent, meeting[0], one, lost) == "DistStoreError"
    assert forked(agent, meeting[0], one) == "{0: 1}"


@pytest.mark.parametrize(("rank", "ending"), [(one, "{0: 1}"), (failed, ChildFailedError.__name__)])
def test_a_run_that_is_over_or_fails_again_and_again_is_closed(
    meeting: tuple[str, object], rank: Callable[[], object], ending: str
) -> None:
    assert forked(agent, meeting[0], rank) == ending
    assert forked(agent, meeting[0], one) == RendezvousClosedError.__name__


def launch_id() -> str:
    return os.environ["LAUNCH_ID"]


def sharing_agent(place: str, error: Exception | None = None) -> tuple[str, str]:
    """The agent's launch, and how it ends."""
    share_launch_id()
    ending = agent(place, launch_id, error)
    return launch_id(), ending


def test_a_node_that_comes_later_belongs_to_the_launch_of_the_first(meeting: tuple[str, object]) -> None:
    """Its ranks must not begin again at the checkpoint that its command names."""
    lost = distributed.DistStoreError("wait timeout after 60000ms")  # type: ignore[attr-defined]
    first, _ = forked(sharing_agent, meeting[0], lost)
    assert forked(sharing_agent, meeting[0]) == (first, f"{{0: '{first}'}}")


def said_of(options: list[str]) -> str:
    sys.argv[1:] = [*options, "/bin/true"]
    try:
        run_agent()
    except UserError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--nnodes", "x"], "invalid literal for int() with base 10: 'x'"),
        (["--nnodes", "4:2"], "min_nodes must be > 0 and <= max_nodes, got min_nodes=4, max_nodes=2"),
        (["--nnodes", "1:2:3"], 'nnodes=1:2:3 is not in "MIN:MAX" format'),
        (["--rdzv-conf", "timeout"], "The rendezvous configuration option 'timeout' must have a value specified."),
        (
            ["--rdzv-endpoint", "a:99999"],
            "The port number of the rendezvous endpoint 'a:99999' must be an integer between 0 and 65536.",
        ),
    ],
)
def test_options_that_torchrun_cannot_use_are_told_in_a_sentence(options: list[str], told: str) -> None:
    assert forked(said_of, options) == f"torchrun cannot use its options: {told}"
