"""The optimizer step on DeepSpeed, ZeRO 0 to 3: the only package that imports it."""

from megahead.engine.engine import Engine, StepResult
from megahead.engine.rows import RowEngine
from megahead.engine.stop import deepspeed_session

__all__ = ["Engine", "RowEngine", "StepResult", "deepspeed_session"]
