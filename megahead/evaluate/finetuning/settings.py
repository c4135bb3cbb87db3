"""How a task is fine-tuned; the paper's values are the defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megahead.errors import FieldError

LossName = Literal["balanced", "regular"]


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Settings of one task's runs; AdamW with a constant learning rate after a linear warm-up."""

    loss: LossName
    """Cross-entropy in which all classes (`balanced`) or all examples (`regular`) of a batch weigh the same."""

    learning_rate: float
    weight_decay: float
    """Weight decay of matrices."""

    batch_size: int
    epochs: int = 10

    warmup: float = 0.1
    """Share of all steps in which the learning rate grows."""

    max_length: int = 128
    """Tokens of a sequence; of a longer pair the longer text is cut."""

    gradient_clipping: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "batch_size", "epochs"):
            if getattr(self, name) <= 0:
                raise FieldError(f"--{name.replace('_', '-')}", "be above 0", got=getattr(self, name))
        if self.weight_decay < 0:
            raise FieldError("--weight-decay", "be at least 0", got=self.weight_decay)
        if self.max_length < 8:
            raise FieldError("--max-length", "be at least 8", got=self.max_length)


def paper_settings(task: str, loss: LossName | None = None, **changes: float | None) -> FineTuning:
    """The paper's settings for a task (tables 11 and 13; XNLI as in its text), except for `changes` that are not None.

    GLUE and SuperGLUE: balanced at 1e-5 without decay, or regular at 5e-6 with 0.01. XNLI: regular, 2e-5, batches of
    128. The paper names no lengths: these are what its encoders read in pretraining.
    """
    if task.startswith("xnli/"):
        chosen = FineTuning(loss=loss or "regular", learning_rate=2e-5, weight_decay=0.0, batch_size=128)
    elif loss == "regular":
        chosen = FineTuning(loss="regular", learning_rate=5e-6, weight_decay=0.01, batch_size=32)
    else:
        chosen = FineTuning(loss="balanced", learning_rate=1e-5, weight_decay=0.0, batch_size=32)
    return replace(chosen, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
