"""torchrun for launch/elastic.sh, patched: an agent that itself fails (not one of its ranks) leaves the rendezvous
open, ranks of all nodes get one LAUNCH_ID, and options that torchrun cannot use end in a sentence.

torchrun (2.13) closes the rendezvous on such an error, permanently, and agents that join later exit at once. An agent
fails this way when a node stops responding while the others start up and wait for it. The rendezvous is still closed
at the end of a run, and by a node that has used up its --max-restarts.
"""

from __future__ import annotations

import os
import secrets
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import config_from_args, main, parse_args

from megahead.errors import UserError, run_command


def keep_rendezvous_open() -> None:
    """Patches torch's rendezvous handler in this process."""
    original_shutdown = DynamicRendezvousHandler.shutdown

    def shutdown(self: DynamicRendezvousHandler) -> bool:
        error = sys.exception()  # the agent's
        if error is None or isinstance(error, ChildFailedError):
            return original_shutdown(self)
        self._stop_heartbeats()
        return True

    DynamicRendezvousHandler.shutdown = shutdown  # type: ignore[method-assign]


def share_launch_id() -> None:
    """Patches torch's rendezvous handler in this process: after a rendezvous LAUNCH_ID is that of the first node."""
    original = DynamicRendezvousHandler.next_rendezvous

    def next_rendezvous(self: DynamicRendezvousHandler) -> RendezvousInfo:
        result, own_id = original(self), os.environ.get("LAUNCH_ID") or secrets.token_hex(8)
        key = f"megahead/launch of {self.settings.run_id}"  # in the store of all nodes, which outlives them
        os.environ["LAUNCH_ID"] = self._store.compare_set(key, "", own_id).decode()
        return result

    DynamicRendezvousHandler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]


def run_agent() -> None:
    """torchrun of the command line. UserError for options that it cannot use."""
    keep_rendezvous_open()
    share_launch_id()
    options = parse_args(None)
    try:
        config_from_args(options)
        parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=0)
    except Exception as error:
        raise UserError(f"torchrun cannot use its options: {error}") from error
    main()


if __name__ == "__main__":
    run_command(run_agent)
