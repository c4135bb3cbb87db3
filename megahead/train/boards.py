"""Live curves of a run: TensorBoard, and Weights & Biases (W&B) if the config asks for it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from megahead.config import RunConfig
from megahead.errors import ConfigError
from megahead.train.run_log import written


def require_boards(config: RunConfig) -> None:
    """ConfigError if the run asks for W&B, but it is not installed."""
    if config.training.wandb is not None and find_spec("wandb") is None:
        hint = "pip install -e '.[wandb]'"
        raise ConfigError("training.wandb", "be left out where wandb is not installed", got="given", hint=hint)


class Boards:
    """Writes scalars by step. A resumed run continues the same W&B run, identified by its folder; W&B keeps what it was
    sent, so that its curves show steps twice that were taken twice."""

    def __init__(self, config: RunConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = config.folder()
        self._folder = folder.tensorboard
        self._tensorboard = SummaryWriter(str(self._folder))
        self._wandb: Any = None
        if config.training.wandb is not None:
            import wandb

            self._wandb = wandb.init(
                project=config.training.wandb,
                name=config.name,
                id=hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:16],
                resume="allow",
                dir=str(folder),
                config=config.model_dump(mode="json"),
            )
            self._wandb.define_metric("*", step_metric="step")  # W&B's own step cannot go back, as a rollback does

    def add(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Writes each value as `group`/NAME. UserError on a full disk."""
        named = {f"{group}/{name}": value for name, value in values.items()}
        with written(self._folder):  # or what an earlier call left to be written
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({**named, "step": step})

    def go_back(self, step: int) -> None:
        """TensorBoard no longer shows what was written of steps after `step`, by this session or an earlier one."""
        self._tensorboard.close()
        self._tensorboard.purge_step = step + 1  # of the file that the next value begins

    def close(self) -> None:
        """Writes what is still buffered."""
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
