"""torchrun, as launch/elastic.sh starts it: an agent that ends by its own error leaves the rendezvous open for others.

torchrun (2.13) closes it then, for good, and agents that come later end at once. Such an error is a node that falls
silent just while others begin, which wait for its answer in vain. The rendezvous is still closed after the end of a
run, and by a node that has used up its --max-restarts.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main


def keep_rendezvous_open() -> None:
    """From here on in this process."""
    close = DynamicRendezvousHandler.shutdown

    def shutdown(self: DynamicRendezvousHandler) -> bool:
        error = sys.exception()  # what ends the agent
        if error is None or isinstance(error, ChildFailedError):
            return close(self)
        self._stop_heartbeats()
        return True

    DynamicRendezvousHandler.shutdown = shutdown  # type: ignore[method-assign]


if __name__ == "__main__":
    keep_rendezvous_open()
    main()
