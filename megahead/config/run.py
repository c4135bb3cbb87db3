"""The whole run: what `configs/NAME.yaml` holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, model_validator

from megahead.config.base import Settings
from megahead.config.checks import check_fit, check_unused
from megahead.config.data import BatchConfig, DataConfig
from megahead.config.masking import MaskedInputsConfig, MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.config.training import (
    EngineConfig,
    FaultsConfig,
    InitConfig,
    OptimizerConfig,
    ParallelConfig,
    ResumeConfig,
    ScheduleConfig,
    TasksConfig,
    TrainingConfig,
)
from megahead.errors import ConfigError
from megahead.run_folder import RunFolder


class RunConfig(Settings):
    """Everything that decides what a run computes and writes."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    """Name of the run: letters, digits, dots, dashes and underscores; not dots alone."""

    output_dir: str | None = None
    """Folder of checkpoints and logs; runs/NAME by default."""

    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of weights, sample order and dropout."""

    model: ModelConfig
    data: DataConfig
    masking: MaskingConfig | None = None
    """How an encoder's rows are framed and masked; none for decoders."""

    masked_inputs: MaskedInputsConfig | None = None
    """Masks some tokens that a decoder reads; none by default."""

    batch: BatchConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig
    parallel: ParallelConfig = ParallelConfig()
    engine: EngineConfig = EngineConfig()
    faults: FaultsConfig = FaultsConfig()
    resume: ResumeConfig = ResumeConfig()
    init: InitConfig | None = None
    tasks: TasksConfig | None = None

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> RunConfig:
        if not (info.context or {}).get("saved"):
            check_fit(self)
            check_unused(self)
        return self

    def why_headless_exports(self) -> str | None:
        """What keeps exports from having a head: something that no class of transformers does; None where they can."""
        auxiliary = self.objective.auxiliary()
        if auxiliary is not None and auxiliary.why_headless is not None:
            return auxiliary.why_headless
        if self.objective.score != "dot":
            return f"scores by `{self.objective.score}`"
        if self.masking and self.masking.mask_decoder_layers:
            return "reads mask tokens in a decoder of its own"
        late = self.masking.masks_from_layer if self.masking else 0
        return f"reads mask tokens from layer {late} on" if late else None

    def trained_model(self) -> ModelConfig:
        """The model with the layers that are there in training alone."""
        more = self.masking.mask_decoder_layers if self.masking else 0
        return self.model.model_copy(update={"num_layers": self.model.num_layers + more}) if more else self.model

    def generator(self) -> ModelConfig | None:
        """The shape of what fills in masked tokens beside the model; None where the model itself does."""
        auxiliary = self.objective.auxiliary()
        return None if auxiliary is None else auxiliary.generator(self.model)

    def usable_ranks(self, there: int) -> int:
        """How many of the launcher's ranks train: under `parallel.elastic` the most that batch and tensor ranks allow.

        ConfigError if they are too few for one copy of the weights.
        """
        if not self.parallel.elastic:
            return there
        if there < self.parallel.tensor:
            raise ConfigError("parallel.tensor", f"be at most the number of ranks ({there})", got=self.parallel.tensor)
        return self.parallel.tensor * self.batch.most_data_ranks(there // self.parallel.tensor)

    def sample_length(self) -> int:
        """The `sequence_length` of the run's `Samples`, which read one token more than it. A masked row has
        data.sequence_length - 2 tokens of text between [CLS] and [SEP]; consecutive rows share one of them."""
        return self.data.sequence_length - (3 if self.masking else 0)

    def masked_from(self) -> int:
        """How many of a run's steps come before the first one that masks."""
        schedule = self.objective.schedule
        return schedule.causal_until(self.training.steps) if schedule else 0

    def targets_per_row(self) -> int:
        """Targets of a whole row, on average over the steps that learn as this config says: of an encoder that is
        causal at first, those that mask."""
        if self.masking is None:
            return self.data.sequence_length
        if self.model.is_causal:
            return self.data.sequence_length - 2  # the text between [CLS] and [SEP]
        return max(1, round(self.masking.rate_at(0.5) * (self.data.sequence_length - 2)))

    def folder(self) -> RunFolder:
        """Where the run writes."""
        return RunFolder(Path(self.output_dir or f"runs/{self.name}"))

    def flat(self) -> dict[str, Any]:
        """Every setting under its full name, `section.field`."""
        return dict(_leaves(self.model_dump(mode="json")))

    def tokens_per_step(self) -> int:
        """Input tokens of one optimizer step over all ranks."""
        return self.batch.global_size * self.data.sequence_length


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
