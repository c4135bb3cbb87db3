"""The agent of launch/elastic.sh on a node of the soak: with a clock that jumps when the soak wants it to."""

import os
from pathlib import Path

from torch.distributed.run import main

from benchmarks.soak.clock import keep_time_by
from megahead.distributed.agent import leave_meetings_open

if __name__ == "__main__":
    keep_time_by(Path(os.environ["SOAK_NODE"]) / "ahead")
    leave_meetings_open()
    main()
