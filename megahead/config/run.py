"""The whole run: what `configs/NAME.yaml` holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.config.batch import BatchConfig
from megahead.config.causal import check_causal
from megahead.config.data import DataConfig
from megahead.config.detection import check_detection
from megahead.config.embedding import Refusal, refusal_of_decay, refusal_of_rows, wants_rows
from megahead.config.id_files import check_id_files
from megahead.config.init import InitConfig
from megahead.config.masked_inputs import MaskedInputsConfig
from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.config.parallel import ParallelConfig
from megahead.config.resilience import FaultsConfig, ResumeConfig
from megahead.config.shorter_rows import check_shorter_rows
from megahead.config.tasks import TasksConfig
from megahead.config.training import EngineConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from megahead.errors import ConfigError
from megahead.far.address import is_far
from megahead.run_folder import RunFolder


class RunConfig(Settings):
    """Everything that decides what a run computes and writes."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    """Name of the run: letters, digits, dot, dash, underscore; not only dots."""

    output_dir: str | None = None
    """Folder of checkpoints and logs; runs/NAME when left out."""

    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of weights, sample order and dropout."""

    model: ModelConfig
    data: DataConfig
    masking: MaskingConfig | None = None
    """How an encoder's rows are framed and masked; left out for decoders, which predict the next token."""

    masked_inputs: MaskedInputsConfig | None = None
    """A decoder reads some tokens masked, and predicts the text; left out, it reads all as they are."""

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
        self._check_masking()
        if self.masked_inputs:
            self.masked_inputs.check(self.model, self.data)
        check_causal(self.model, self.objective.schedule, self.masking, self.training, self.tasks)
        check_detection(self.objective, self.model, self.masking, self.training, self.init)
        check_id_files(self.data, self.masking, self.objective)
        self._check_table()
        self._check_elastic()
        if self.output_dir is not None and is_far(self.output_dir):
            hint = "a run trains on a disk, and is copied to training.mirror"
            raise ConfigError("output_dir", "be a folder of a disk", got=repr(self.output_dir), hint=hint)
        if self.objective.schedule:
            self.objective.schedule.check(self.training.steps)
        if self.schedule.warmup_steps + (self.schedule.decay_steps or 0) > self.training.steps:
            raise ConfigError(
                "schedule.warmup_steps",
                f"leave its warm-up and decay within training.steps ({self.training.steps})",
                got=f"{self.schedule.warmup_steps} + {self.schedule.decay_steps or 0}",
            )
        if self.tasks and self.data.tokenizer is None:
            raise ConfigError("data.tokenizer", "name the tokenizer that `tasks` are read with", got="missing")
        if self.tasks and (reason := self.why_headless_exports()):
            raise ConfigError("tasks", f"be left out of a run that {reason}, whose exports have no head", got="given")
        settings = self.flat()
        for name in self.resume.allow:
            if not any(f"{setting}.".startswith(f"{name}.") for setting in settings):
                hint = "write optimizer.learning_rate, or schedule"
                raise ConfigError("resume.allow", "name settings or their sections", got=repr(name), hint=hint)
        if self.init and self.init.copies_embedding() and self.model.is_encoder():
            raise ConfigError("init.mode", "be `continue` or `table` for an encoder", got=repr(self.init.mode))
        if self.init and self.init.copies_embedding() and self.objective.head() != "trained":
            raise ConfigError(
                "init.mode",
                "be `continue` or `table` unless the objective is an untied vanilla softmax",
                got=repr(self.init.mode),
                hint="set objective.name=vanilla, which trains the head",
            )
        return self

    def _check_table(self) -> None:
        table, decay, refusal = self.optimizer.table, refusal_of_decay(self.optimizer), self.refusal_of_rows()
        if decay is not None and table.learning_rate_ratio != 1:
            raise decay
        if self.engine.embedding == "rows" and refusal is not None:
            raise refusal.error
        if table.rule != "adamw" and not self.in_rows():
            raise ConfigError("optimizer.table.rule", "be adamw where the embedding is dense", got=table.rule)
        if table.rule != "adamw" and self.objective.ends_vanilla():
            rule = "be adamw with objective.schedule.vanilla_share, by which all rows end"
            raise ConfigError("optimizer.table.rule", rule, got=table.rule)

    def _check_elastic(self) -> None:
        if not self.parallel.elastic:
            return
        if not self.batch.most_data_ranks(1):
            rule = f"be a multiple of batch.micro_size ({self.batch.micro_size}) under parallel.elastic"
            hint = "no number of ranks can serve it"
            raise ConfigError("batch.global_size", rule, got=self.batch.global_size, hint=hint)
        if self.objective.group_samples == "data_parallel":
            rule = "not depend on the number of ranks under parallel.elastic"
            raise ConfigError("objective.group_samples", rule, got="data_parallel", hint="write a number of samples")

    def _check_masking(self) -> None:
        masking, encoder = self.masking, self.model.is_encoder()
        if (masking is not None) != encoder:
            rule = "be given for an encoder" if encoder else "be left out of a decoder"
            got, hint = ("missing", "name mask_token, cls_token and sep_token") if encoder else ("given", "")
            raise ConfigError("masking", rule, got=got, hint=hint)
        if masking is None:
            return
        masking.check(self.model, self.data)
        check_shorter_rows(masking, self.model, self.init, self.parallel.sequence)

    def why_headless_exports(self) -> str | None:
        """What keeps exports from having a head: something that no class of transformers does; None where they can."""
        if self.objective.replaced_tokens is not None:
            return "tells replaced tokens and predicts none"
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
        asked = self.objective.replaced_tokens
        return None if asked is None else self.model.model_copy(update={"num_layers": asked.generator_layers})

    def in_rows(self) -> bool:
        """Whether the embedding lies in rows, sharded round-robin over all ranks."""
        if self.engine.embedding != "auto":
            return self.engine.embedding == "rows"
        return wants_rows(self.model.vocab_size, self.optimizer.table) and self.refusal_of_rows() is None

    def usable_ranks(self, there: int) -> int:
        """How many of the launcher's ranks train: under `parallel.elastic` the most that batch and tensor ranks allow.

        ConfigError if they are too few for one copy of the weights.
        """
        if not self.parallel.elastic:
            return there
        if there < self.parallel.tensor:
            raise ConfigError("parallel.tensor", f"be at most the number of ranks ({there})", got=self.parallel.tensor)
        return self.parallel.tensor * self.batch.most_data_ranks(there // self.parallel.tensor)

    def refusal_of_rows(self) -> Refusal | None:
        """What keeps the embedding from lying in rows."""
        return refusal_of_rows(self.objective, self.optimizer)

    def sample_length(self) -> int:
        """The `sequence_length` of the run's `Samples`, which read one token more than it. A masked row has
        data.sequence_length - 2 tokens of text between [CLS] and [SEP]; consecutive rows share one of them."""
        return self.data.sequence_length - (3 if self.masking else 0)

    def targets_per_row(self) -> int:
        """Targets of a whole row, on average over the run."""
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
