"""Training: the state that survives a restart, the step, the loop, and the setup that puts a run together."""

from megahead.train.describe import describe_run
from megahead.train.setup import pretrain

__all__ = ["describe_run", "pretrain"]
