"""The whole run: what `configs/NAME.yaml` holds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.config.batch import BatchConfig
from megahead.config.data import DataConfig
from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.config.parallel import ParallelConfig
from megahead.config.training import EngineConfig, OptimizerConfig, ScheduleConfig
from megahead.errors import ConfigError


class TrainingConfig(Settings):
    """How long to train, and what to write on the way."""

    steps: int = Field(gt=0)
    """Optimizer steps of the whole run."""

    max_seconds: float | None = Field(default=None, gt=0)
    """Stop (saved, evaluated) after this many seconds of training, whatever the step."""

    log_seconds: float = Field(default=5.0, ge=0)
    """Seconds between lines on the console; 0 prints every step."""

    evaluate_every: int = Field(default=500, gt=0)
    """Optimizer steps between evaluations; also evaluated at the end."""

    evaluate_samples: int = Field(default=64, gt=0)
    """Rows of the validation dataset an evaluation reads."""

    checkpoint_every: int = Field(default=1000, gt=0)
    """Optimizer steps between checkpoints; also saved at the end."""

    keep_checkpoints: int = Field(default=2, gt=0)
    """Newest checkpoints kept on disk."""


class InitConfig(Settings):
    """Weights to start from, instead of random ones."""

    from_checkpoint: str
    """A checkpoint folder of ours (or a run folder: its newest one)."""

    mode: Literal["continue", "finetune", "probe"] = "finetune"
    """`finetune`: train an untied head, started as a copy of the embedding, with the body; `probe`: that head alone,
    the body frozen; `continue`: the weights as they are, a new schedule."""


class RunConfig(Settings):
    """Everything that decides what a run computes and writes."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run: letters, digits, dot, dash, underscore."""

    output_dir: str | None = None
    """Folder of checkpoints and logs; runs/NAME when left out."""

    seed: int = Field(default=1234, ge=0)
    """Seed of weights, sample order and dropout."""

    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig
    parallel: ParallelConfig = ParallelConfig()
    engine: EngineConfig = EngineConfig()
    init: InitConfig | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        self.parallel.check(self.model, self.data.sequence_length)
        if self.data.sequence_length > self.model.max_positions:
            raise ConfigError(
                "data.sequence_length",
                f"be at most model.max_positions ({self.model.max_positions})",
                got=self.data.sequence_length,
            )
        if self.data.end_token >= self.model.vocab_size:
            raise ConfigError(
                "data.end_token", f"be below model.vocab_size ({self.model.vocab_size})", got=self.data.end_token
            )
        if self.schedule.warmup_steps + (self.schedule.decay_steps or 0) > self.training.steps:
            raise ConfigError(
                "schedule.warmup_steps",
                f"leave its warm-up and decay within training.steps ({self.training.steps})",
                got=f"{self.schedule.warmup_steps} + {self.schedule.decay_steps or 0}",
            )
        if self.init and self.init.mode in ("finetune", "probe") and self.objective.head() != "trained":
            raise ConfigError(
                "init.mode",
                "be `continue` unless the objective is an untied vanilla softmax",
                got=repr(self.init.mode),
                hint="set objective.name=vanilla, which trains the head",
            )
        return self

    def folder(self) -> str:
        """Where the run writes."""
        return self.output_dir or f"runs/{self.name}"

    def tokens_per_step(self) -> int:
        """Input tokens of one optimizer step over all ranks."""
        return self.batch.global_size * self.data.sequence_length
