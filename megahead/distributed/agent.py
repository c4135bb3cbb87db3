"""torchrun, as launch/elastic.sh starts it: an agent that ends by an error of its own leaves the others' meeting open.

torchrun (2.13) closes it then, for good: agents that come later end at once, for as long as the machine lives where
they meet. A node that falls silent just while others begin is such an error of theirs (they wait for its answer in
vain).
Closed it is still after the end of a run, and by a node that has used up its --max-restarts.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main


def leave_meetings_open() -> None:
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
    leave_meetings_open()
    main()
