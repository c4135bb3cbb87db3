"""The optimizer step on DeepSpeed, ZeRO 0 to 3: the only package that imports it.

*Micro-step*: forward and backward of one micro-batch; *step*: the update after the last of them, which `skip_step`
replaces. *Hollow* parameter: it has a shape, but no memory yet. *Master copy*: the fp32 weight that ZeRO updates.
"""

from megahead.engine.engine import Engine, StepResult
from megahead.engine.forward_time import ForwardTime
from megahead.engine.rows import RowEngine
from megahead.engine.stop import deepspeed_session
from megahead.engine.weight_sums import weight_sums

__all__ = ["Engine", "ForwardTime", "RowEngine", "StepResult", "deepspeed_session", "weight_sums"]
