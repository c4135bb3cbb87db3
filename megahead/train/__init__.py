"""Training: the state that survives a restart, the step, the loop, and the setup that puts a run together."""

from megahead.train.describe import describe_run
from megahead.train.run import Run
from megahead.train.setup import pretrain

__all__ = ["Run", "describe_run", "pretrain"]
