"""Training: the state that survives a restart, the step, the loop, and the setup that puts a run together.

A *run* is a config trained to its end; a *session* is one launch of it, from start or resume to its *ending*. *Step*:
one optimizer step, applied or skipped. *Guard*: judges each step by its losses; *fault*: what it found wrong.
*Progress*: how far a run has come, which is what a checkpoint holds. *Lineage*: which checkpoints led to its weights.
*Tally*: what a step measured, told to all ranks. *Meters*: everything that a run reports.

Training needs torch and DeepSpeed, which are imported at the first use of `pretrain`, not with the package.
"""

from typing import TYPE_CHECKING

from megahead.on_first_use import on_first_use
from megahead.train.describe import describe_run
from megahead.train.preflight import check_present, files_of

if TYPE_CHECKING:
    from megahead.train.run import Run
    from megahead.train.setup import pretrain

__all__ = ["Run", "check_present", "describe_run", "files_of", "pretrain"]

__getattr__ = on_first_use(__name__, run=("Run",), setup=("pretrain",))
