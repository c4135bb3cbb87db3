"""The whole run: what `configs/NAME.yaml` holds, and which settings fit together beyond what each section checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, model_validator

from megahead.config.base import Settings, refuse, require
from megahead.config.data import BatchConfig, DataConfig
from megahead.config.embedding import check_embedding
from megahead.config.masking import SPECIAL_TOKEN_FIELDS, STRATEGIES_BY_SETTING, MaskedInputsConfig, MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.config.token_subsets import SUBSET_FIELDS, check_token_subsets
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
from megahead.remote_files import is_remote
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
            check_consistency(self)
            refuse_unused(self)
        return self

    def no_head_reason(self) -> str | None:
        """What keeps exports from having a head: something that no class of transformers does; None where they can."""
        auxiliary = self.objective.auxiliary()
        if auxiliary is not None and auxiliary.no_head_reason is not None:
            return auxiliary.no_head_reason
        if self.objective.score != "dot":
            return f"scores by `{self.objective.score}`"
        if self.masking and self.masking.mask_decoder_layers:
            return "reads mask tokens in a decoder of its own"
        late = self.masking.masks_from_layer if self.masking else 0
        return f"reads mask tokens from layer {late} on" if late else None

    def model_in_training(self) -> ModelConfig:
        """The model with the layers that are there in training alone."""
        more = self.masking.mask_decoder_layers if self.masking else 0
        return self.model.model_copy(update={"num_layers": self.model.num_layers + more}) if more else self.model

    def generator_config(self) -> ModelConfig | None:
        """The shape of what fills in masked tokens beside the model; None where the model itself does."""
        auxiliary = self.objective.auxiliary()
        return None if auxiliary is None else auxiliary.generator_config(self.model)

    def usable_ranks(self, there: int) -> int:
        """How many of the launcher's ranks train: under `parallel.elastic` the most that batch and tensor ranks allow.

        ConfigError if they are too few for one copy of the weights.
        """
        if not self.parallel.elastic:
            return there
        if there < self.parallel.tensor:
            raise ConfigError("parallel.tensor", f"be at most the number of ranks ({there})", got=self.parallel.tensor)
        return self.parallel.tensor * self.batch.max_data_ranks(there // self.parallel.tensor)

    def sample_length(self) -> int:
        """The `sequence_length` of the run's `Samples`, which read one token more than it. A masked row has
        data.sequence_length - 2 tokens of text between [CLS] and [SEP]; consecutive rows share one of them."""
        return self.data.sequence_length - (3 if self.masking else 0)

    def steps_before_masking(self) -> int:
        """How many of a run's steps come before the first one that masks."""
        schedule = self.objective.schedule
        return schedule.causal_steps(self.training.steps) if schedule else 0

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


# Settings that nothing of a run reads: refused in what a user gives, left out of what checkpoints of a phase hold.


_READ_BY: Mapping[str, tuple[str, ...]] = {
    "span_stop": ("span",),
    "longest_span": ("span", "pmi", "whole_word"),
    "frequency_power": ("frequency",),
    "adapt_every": ("hardest",),
    "least_pmi": ("pmi",),
    "least_count": ("pmi", "informative"),
}
"""Fields of `masking`, and the strategies that read them."""


def refuse_unused(config: RunConfig) -> None:
    """ConfigError for the first of them."""
    for section, field, why in _unused(config):
        got = getattr(getattr(config, section), field)
        raise ConfigError(f"{section}.{field}", f"be left out {why}", got=got)


def reset_unused(config: RunConfig) -> RunConfig:
    """With their defaults in their places."""
    for section, field, _ in list(_unused(config)):
        given: Settings = getattr(config, section)
        kept = given.model_copy(update={field: type(given).model_fields[field].default})
        config = config.model_copy(update={section: kept})
    return config


def _unused(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(section, field, why nothing reads it)."""
    masking, causal = config.masking, config.model.is_causal
    strategies = set[str]() if masking is None else set(masking.strategies_by_setting().values())
    for field in () if masking is None else masking.changed():
        readers = _READ_BY.get(field, ())
        if causal and field not in SPECIAL_TOKEN_FIELDS:
            yield "masking", field, "with model.is_causal: nothing is masked where next tokens are learned"
        elif readers and not strategies.intersection(readers):
            settings = [setting for setting, known in STRATEGIES_BY_SETTING.items() if set(known) & set(readers)]
            yield "masking", field, f"without {' or '.join(settings)}: {' or '.join(readers)}"
    if config.data.id_weights is not None and (masking is None or causal or not masking.uses_id_weights()):
        yield "data", "id_weights", f"without {' or '.join(STRATEGIES_BY_SETTING)}: weights"


# Encoders that learn next tokens, always or at first: what only masked tokens have is refused beside it.


def _check_causal(config: RunConfig) -> None:
    """A model may be causal for a share of the run, where all else goes with that."""
    model, masking, setting = config.model, config.masking, "objective.schedule.causal_share"
    share = config.objective.schedule.causal_share if config.objective.schedule else None
    if model.is_causal:
        whose = "with model.is_causal: true" if model.is_encoder() else f"of a {model.family}"
        refuse(setting, share, f"{whose}, where all steps are causal")
    elif share is None:
        return
    if masking is not None:
        setting = "model.is_causal" if model.is_causal else setting
        for field, value in masking.changed(*SUBSET_FIELDS).items():
            refuse(f"masking.{field}", value, f"with {setting}: nothing is masked where next tokens are learned")
        rule = f"be one that counts no misses of masked tokens with {setting}, by which there are none at first"
        require(not masking.is_adaptive(), "masking.strategy", rule, got=masking.strategy)
    if model.is_encoder():
        why = "of a run whose encoder is causal at first or throughout: they are those of masked tokens"
        refuse("tasks", config.tasks and "given", why)
    if share is not None:
        why = f"with {setting}: losses of next and of masked tokens cannot be compared"
        refuse("training.keep_best", config.training.keep_best, why)


def _check_corrected(config: RunConfig) -> None:
    """Where masks prefer some ids, the chance of being a candidate, by which a corrected bias divides and which is
    computed from the counts of the text, would be wrong."""
    objective, masking = config.objective, config.masking
    if objective.bias != "corrected" or masking is None or config.model.is_causal:
        return
    auxiliary = objective.auxiliary()
    by_auxiliary = auxiliary is not None and auxiliary.skews_targets
    other = f"objective.{objective.auxiliary_name()}" if by_auxiliary else f"masking.strategy: {masking.strategy}"
    rule = f"be another with {other}, by which ids are targets more or less often than in the text"
    weighs = by_auxiliary or masking.skews_targets()
    require(not weighs, "objective.bias", rule, got="corrected", hint="take paper or once")


def check_consistency(config: RunConfig) -> None:
    """ConfigError for the first settings that do not."""
    _check_rows(config)
    _check_masking(config)
    if config.masked_inputs:
        config.masked_inputs.check(config.model, config.data)
    _check_causal(config)
    if auxiliary := config.objective.auxiliary():
        auxiliary.check(config)
    _check_corrected(config)
    _check_masking_schedule(config)
    if config.masking is not None and config.masking.uses_id_weights():
        rule = f"be given with {' or '.join(STRATEGIES_BY_SETTING)}: weights"
        require(config.data.id_weights is not None, "data.id_weights", rule, got="missing")
    check_embedding(config)
    _check_elastic(config)
    hint = "a run trains on a disk, and is copied to training.remote_checkpoints"
    local = config.output_dir is None or not is_remote(config.output_dir)
    require(local, "output_dir", "be a folder of a disk", got=repr(config.output_dir), hint=hint)
    _check_schedule(config)
    _check_tasks(config)
    _check_resume(config)
    _check_init(config)


def _check_rows(config: RunConfig) -> None:
    model, length, end = config.model, config.data.sequence_length, config.data.end_token
    config.parallel.check(model, length)
    rule = f"be at most model.max_positions ({model.max_positions})"
    require(length <= model.max_positions, "data.sequence_length", rule, got=length)
    require(end < model.vocab_size, "data.end_token", f"be below model.vocab_size ({model.vocab_size})", got=end)


def _check_masking(config: RunConfig) -> None:
    masking, encoder = config.masking, config.model.is_encoder()
    if encoder:
        hint = "name mask_token, cls_token and sep_token"
        require(masking, "masking", "be given for an encoder", got="missing", hint=hint)
    else:
        refuse("masking", masking and "given", "of a decoder")
    if masking is not None:
        masking.check(config.model, config.data)
        check_token_subsets(masking, config)


def _check_elastic(config: RunConfig) -> None:
    batch, group = config.batch, config.objective.group_samples
    if config.parallel.elastic:
        rule = f"be a multiple of batch.micro_size ({batch.micro_size}) under parallel.elastic"
        hint = "no number of ranks can serve it"
        require(batch.max_data_ranks(1), "batch.global_size", rule, got=batch.global_size, hint=hint)
        rule, hint = "not depend on the number of ranks under parallel.elastic", "write a number of samples"
        require(group != "data_parallel", "objective.group_samples", rule, got=group, hint=hint)


def _check_schedule(config: RunConfig) -> None:
    steps, schedule = config.training.steps, config.schedule
    if config.objective.schedule:
        config.objective.schedule.check(steps)
    warmup, decay = schedule.warmup(steps), schedule.decay(steps)
    rule, got = f"leave its warm-up and decay within training.steps ({steps})", f"{warmup} + {decay}"
    hint = "" if warmup < steps else "a share, such as 0.01, follows training.steps"
    require(warmup + decay <= steps, "schedule.warmup_steps", rule, got=got, hint=hint)


def _check_masking_schedule(config: RunConfig) -> None:
    masking, objective = config.masking, config.objective
    if masking is not None and (objective.negatives or objective.bias == "once"):
        counted = "negatives" if objective.negatives else "bias: once"
        why = f"with objective.{counted}, whose training-free head knows one number of targets"
        refuse("masking.final_rate", masking.final_rate, why)


def _check_tasks(config: RunConfig) -> None:
    if config.tasks:
        rule = "name the tokenizer that `tasks` are read with"
        require(config.data.tokenizer is not None, "data.tokenizer", rule, got="missing")
        reason = config.no_head_reason()
        refuse("tasks", reason and "given", f"of a run that {reason}, whose exports have no head")


def _check_resume(config: RunConfig) -> None:
    settings = config.flat()
    for name in config.resume.allow:
        known = any(f"{setting}.".startswith(f"{name}.") for setting in settings)
        hint = "write optimizer.learning_rate, or schedule"
        require(known, "resume.allow", "name settings or their sections", got=repr(name), hint=hint)


def _check_init(config: RunConfig) -> None:
    init = config.init
    if init is None or not init.copies_embedding():
        return
    got = repr(init.mode)
    require(not config.model.is_encoder(), "init.mode", "be `continue` or `table` for an encoder", got=got)
    rule = "be `continue` or `table` unless the objective is an untied vanilla softmax"
    hint = "set objective.name=vanilla, which trains the head"
    require(config.objective.head() == "trained", "init.mode", rule, got=got, hint=hint)
