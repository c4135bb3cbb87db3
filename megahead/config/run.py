"""The config of a run, `configs/NAME.yaml`, and checks between its sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, model_validator

from megahead.config.base import Settings, refuse, require
from megahead.config.data import BatchConfig, DataConfig
from megahead.config.embedding import check_embedding
from megahead.config.masking import SPECIAL_TOKEN_FIELDS, STRATEGIES_BY_SETTING, MaskedInputsConfig, MaskingConfig
from megahead.config.model import DISTILBERT_EPS, ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.config.token_subsets import TOKEN_SUBSET_FIELDS, check_token_subsets
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
    """An encoder's special tokens, and how its rows are masked; none for decoders."""

    masked_inputs: MaskedInputsConfig | None = None
    """Masks some tokens that a decoder reads."""

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
    def _check_consistency(self, info: ValidationInfo) -> RunConfig:
        if not (info.context or {}).get("saved"):  # a config of a checkpoint was checked by the version that saved it
            check_consistency(self)
            for section, field, why in _unused_settings(self):
                got = getattr(getattr(self, section), field)
                raise ConfigError(f"{section}.{field}", f"be left out {why}", got=got)
        return self

    def no_head_reason(self) -> str | None:
        """Why a class of transformers cannot have an export's head; None if one can."""
        if reason := self.objective.auxiliary_or_empty().no_head_reason:
            return reason
        if self.objective.score != "dot":
            return f"scores by `{self.objective.score}`"
        if self.masking and self.masking.mask_decoder_layers:
            return "reads mask tokens in a decoder of its own"
        first_masked_layer = self.masking.masks_from_layer if self.masking else 0
        return f"reads mask tokens from layer {first_masked_layer} on" if first_masked_layer else None

    def freezes_body(self) -> bool:
        """Whether all of the backbone but the embedding is frozen."""
        return self.init is not None and self.init.mode in ("probe", "table")

    def freezes_embedding(self) -> bool:
        """Whether the embedding is frozen, too, so that nothing before the head has a gradient."""
        return self.init is not None and self.init.mode == "probe"

    def reads_items(self) -> bool:
        """Whether its rows are sequences of items instead of text (docs/items.md)."""
        return self.tasks is not None and self.tasks.items is not None

    def model_with_mask_decoder(self) -> ModelConfig:
        """The model with a mask decoder's layers, which exports leave out."""
        if not (self.masking and self.masking.mask_decoder_layers):
            return self.model
        num_layers = self.model.num_layers + self.masking.mask_decoder_layers
        return self.model.model_copy(update={"num_layers": num_layers})

    def generator_config(self) -> ModelConfig | None:
        """The shape of the generator that learns the masked tokens; None if the model itself does."""
        return self.objective.auxiliary_or_empty().generator_config(self.model)

    def usable_ranks(self, available: int) -> int:
        """The number of ranks that train: under `parallel.elastic` the most that batch and tensor ranks allow.

        ConfigError if they are too few for one copy of the weights.
        """
        tensor = self.parallel.tensor
        if not self.parallel.elastic:
            return available
        require(available >= tensor, "parallel.tensor", f"be at most the number of ranks ({available})", got=tensor)
        return tensor * self.batch.max_data_ranks(available // tensor)

    def sample_length(self) -> int:
        """The `sequence_length` of the run's `Samples`: one less than the tokens of text in a row, as consecutive rows
        share one. A decoder's row has T + 1 of them (T: data.sequence_length), an encoder's T - 2, between [CLS] and
        [SEP]."""
        return self.data.sequence_length - (3 if self.masking else 0)

    def steps_before_masking(self) -> int:
        """Number of causal steps before the first masked one."""
        schedule = self.objective.schedule
        return schedule.causal_steps(self.training.steps) if schedule else 0

    def targets_per_row(self) -> int:
        """Targets of a full row, on average over the run; an encoder's causal phase does not count."""
        if self.masking is None:
            return self.data.sequence_length
        if self.model.is_causal:
            return self.data.sequence_length - 2  # the text between [CLS] and [SEP]
        return max(1, round(self.masking.rate_at(0.5) * (self.data.sequence_length - 2)))

    def folder(self) -> RunFolder:
        """The folder that the run writes to."""
        return RunFolder(Path(self.output_dir or f"runs/{self.name}"))

    def flat(self) -> dict[str, Any]:
        """All settings by full name, `section.field`."""
        return dict(_flatten(self.model_dump(mode="json")))

    def tokens_per_step(self) -> int:
        """Input tokens of one optimizer step over all ranks."""
        return self.batch.global_size * self.data.sequence_length


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Settings without effect in a run: refused in a user's config, reset to defaults in the checkpoints of a phase.


_STRATEGIES_BY_FIELD: Mapping[str, tuple[str, ...]] = {
    "span_stop": ("span",),
    "longest_span": ("span", "pmi", "whole_word"),
    "frequency_power": ("frequency",),
    "adapt_every": ("hardest",),
    "least_pmi": ("pmi",),
    "least_count": ("pmi", "informative"),
}
"""Fields of `masking`, and the strategies that read them."""


def reset_unused(config: RunConfig) -> RunConfig:
    """The config with unused settings at their defaults."""
    for section, field, _ in list(_unused_settings(config)):
        settings: Settings = getattr(config, section)
        default = type(settings).model_fields[field].default
        config = config.model_copy(update={section: settings.model_copy(update={field: default})})
    return config


def _unused_settings(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(section, field, why it has no effect)"""
    masking, causal = config.masking, config.model.is_causal
    strategies = set[str]() if masking is None else set(masking.strategies_by_setting().values())
    for field in () if masking is None else masking.changed():
        strategies_needed = _STRATEGIES_BY_FIELD.get(field, ())
        if causal and field not in SPECIAL_TOKEN_FIELDS:
            yield "masking", field, "with model.is_causal: nothing is masked where next tokens are learned"
        elif strategies_needed and not strategies.intersection(strategies_needed):
            settings = [
                setting for setting, names in STRATEGIES_BY_SETTING.items() if set(names) & set(strategies_needed)
            ]
            yield "masking", field, f"without {' or '.join(settings)}: {' or '.join(strategies_needed)}"
    if config.data.id_weights is not None and (masking is None or causal or not masking.uses_id_weights()):
        yield "data", "id_weights", f"without {' or '.join(STRATEGIES_BY_SETTING)}: weights"


# Encoders that are causal, throughout or at first: settings that need masked tokens are refused.


def _check_causal(config: RunConfig) -> None:
    """Raises ConfigError for settings that exclude a causal encoder or `causal_share`."""
    model, masking, setting = config.model, config.masking, "objective.schedule.causal_share"
    share = config.objective.schedule.causal_share if config.objective.schedule else None
    if model.is_causal:
        reason = "with model.is_causal: true" if model.is_encoder() else f"of a {model.family}"
        refuse(setting, share, f"{reason}, where all steps are causal")
    elif share is None:
        return
    if masking is not None:
        setting = "model.is_causal" if model.is_causal else setting
        for field, value in masking.changed(*TOKEN_SUBSET_FIELDS).items():
            refuse(f"masking.{field}", value, f"with {setting}: nothing is masked where next tokens are learned")
        rule = f"be one that does not follow errors at masked tokens: with {setting} none are masked at first"
        require(not masking.is_adaptive(), "masking.strategy", rule, got=masking.strategy)
    if model.is_encoder():
        why = "of a run whose encoder is causal at first or throughout: tasks need a model of masked tokens"
        refuse("tasks", config.tasks and "given", why)
    if share is not None:
        why = f"with {setting}: losses of next and of masked tokens cannot be compared"
        refuse("training.keep_best", config.training.keep_best, why)


def _check_skewed_targets(config: RunConfig) -> None:
    """Refuses settings by which an id's weight follows from its count in the text, if masking prefers some ids:
    `bias: corrected` (inclusion probabilities) and ELECTRA's draws from a group (the weight of the original)."""
    objective, masking, auxiliary = config.objective, config.masking, config.objective.auxiliary_or_empty()
    by_auxiliary, name = auxiliary.skews_targets, objective.auxiliary_name()
    if masking is None or config.model.is_causal or not (by_auxiliary or masking.skews_targets()):
        return
    cause = f"objective.{name}" if by_auxiliary else f"masking.strategy: {masking.strategy}"
    why = f"with {cause}, by which ids are targets more or less often than in the text"
    is_corrected = objective.bias == "corrected"
    require(not is_corrected, "objective.bias", f"be another {why}", got="corrected", hint="take paper or once")
    draws_group = objective.name == "headless" and auxiliary.samples_tokens and not auxiliary.samples_vocabulary()
    require(not draws_group, f"objective.{name}.draws", f"be `vocabulary` {why}", got="`group`")


def check_consistency(config: RunConfig) -> None:
    """Raises ConfigError for the first conflict between sections."""
    _check_lengths_and_ids(config)
    _check_distilbert(config)
    _check_masking(config)
    if config.masked_inputs:
        config.masked_inputs.check(config.model, config.data)
    _check_causal(config)
    config.objective.auxiliary_or_empty().check(config)
    _check_skewed_targets(config)
    _check_masking_schedule(config)
    if config.masking is not None and config.masking.uses_id_weights():
        rule = f"be given with {' or '.join(STRATEGIES_BY_SETTING)}: weights"
        require(config.data.id_weights is not None, "data.id_weights", rule, got="missing")
    check_embedding(config)
    _check_elastic(config)
    hint = "a run trains on a disk, and is copied to training.remote_checkpoints"
    is_local = config.output_dir is None or not is_remote(config.output_dir)
    require(is_local, "output_dir", "be a folder of a disk", got=repr(config.output_dir), hint=hint)
    _check_schedule(config)
    if config.data.validation is None:
        refuse("training.keep_best", config.training.keep_best, "without data.validation, whose loss it compares")
    _check_tasks(config)
    _check_resume(config)
    _check_init(config)


def _check_lengths_and_ids(config: RunConfig) -> None:
    model, length, end = config.model, config.data.sequence_length, config.data.end_token
    config.parallel.check(model, length)
    rule = f"be at most model.max_positions ({model.max_positions})"
    require(length <= model.max_positions, "data.sequence_length", rule, got=length)
    require(end < model.vocab_size, "data.end_token", f"be below model.vocab_size ({model.vocab_size})", got=end)


def _check_distilbert(config: RunConfig) -> None:
    """Refuses what no DistilBERT is exported with; checkpoints of earlier versions may have it."""
    eps = config.model.norm_eps
    rule = f"be {DISTILBERT_EPS} in a DistilBERT (model.token_types 0)"
    hint = "leave it out, or set model.token_types=2"
    require(not config.model.is_distilbert() or eps == DISTILBERT_EPS, "model.norm_eps", rule, got=eps, hint=hint)


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
    warmup, decay = schedule.num_warmup_steps(steps), schedule.num_decay_steps(steps)
    rule, got = f"leave its warm-up and decay within training.steps ({steps})", f"{warmup} + {decay}"
    hint = "" if warmup < steps else "a share, such as 0.01, follows training.steps"
    require(warmup + decay <= steps, "schedule.warmup_steps", rule, got=got, hint=hint)


def _check_masking_schedule(config: RunConfig) -> None:
    """Refuses a mask rate that changes where the training-free head needs the number of targets: with random negatives,
    and with `bias: once` (each candidate weighs 1, however often it occurs)."""
    masking, objective = config.masking, config.objective
    if masking is not None and (objective.negatives or objective.bias == "once"):
        setting = "negatives" if objective.negatives else "bias: once"
        why = f"with objective.{setting}, whose training-free head assumes a constant number of targets"
        refuse("masking.final_rate", masking.final_rate, why)


def _check_tasks(config: RunConfig) -> None:
    if config.tasks:
        rule = "name the tokenizer that `tasks` are read with"
        has_text = set(config.tasks.names) != {"next_item"}
        require(config.data.tokenizer is not None or not has_text, "data.tokenizer", rule, got="missing")
        reason = config.no_head_reason()
        refuse("tasks", reason and "given", f"of a run that {reason}, whose exports have no head")
        if not config.model.transformers_can_bias_head():
            _check_tasks_without_head_bias(config.objective)


def _check_tasks_without_head_bias(objective: ObjectiveConfig) -> None:
    """Refuses `tasks` if a phase of the run is exported with a bias in its head."""
    norms, no_class = "with norms of queries and keys (Qwen 3, Gemma 3)", "no class of transformers has"
    biases = {"output_bias": objective.output_bias, "schedule.vanilla_share": objective.ends_with_vanilla()}
    for field, given in biases.items():
        why = f"{norms} and objective.{field}: {no_class} a head with a bias beside them"
        refuse("tasks", given and "given", why)
    why = f"{norms}, unless objective.bias is corrected: {no_class} a training-free head beside them"
    refuse("tasks", objective.head() == "pmi" and "given", why)


def _check_resume(config: RunConfig) -> None:
    settings = config.flat()
    for name in config.resume.allow:
        known = any(f"{setting}.".startswith(f"{name}.") for setting in settings)
        hint = "write optimizer.learning_rate, or schedule"
        require(known, "resume.allow", "name settings or their sections", got=repr(name), hint=hint)


def _check_init(config: RunConfig) -> None:
    """Refuses `finetune` and `probe`, which start the head as a copy of the embedding, where no such head is trained.
    `continue` trains all loaded weights, `table` only the embedding under a frozen body."""
    init = config.init
    if init is None or not init.copies_embedding():
        return
    got = repr(init.mode)
    require(not config.model.is_encoder(), "init.mode", "be `continue` or `table` for an encoder", got=got)
    rule = "be `continue` or `table` unless the objective has a head beside the embedding"
    hint = "set objective.name=vanilla, which trains the head"
    require(config.objective.trains_head(), "init.mode", rule, got=got, hint=hint)
