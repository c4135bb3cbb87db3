"""Which settings of a run fit together, beyond what each section checks of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megahead.config.base import refuse
from megahead.config.data import DataConfig
from megahead.config.embedding import check_embedding
from megahead.config.masking import FRAMING, WEIGHING, MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig, ObjectiveScheduleConfig
from megahead.config.token_subsets import check_token_subsets, given_subsets
from megahead.config.training import TasksConfig, TrainingConfig
from megahead.errors import ConfigError
from megahead.remote_files import is_remote

if TYPE_CHECKING:
    from megahead.config.run import RunConfig


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


def check_unused(config: RunConfig) -> None:
    """ConfigError for the first of them."""
    masks, files = _unused_masks(config.model, config.masking), _unused_files(config.data, config.masking)
    for section, unused in {"masking": masks, "data": files}.items():
        for field, why in unused:
            got = getattr(getattr(config, section), field)
            raise ConfigError(f"{section}.{field}", f"be left out {why}", got=got)


def without_unused(config: RunConfig) -> RunConfig:
    """With their defaults in their places."""
    masking, changes = config.masking, dict[str, Any]()
    if masking is not None:
        defaults = {field: _default(field) for field, _ in _unused_masks(config.model, masking)}
        changes["masking"] = masking = masking.model_copy(update=defaults)
    files = {field: None for field, _ in _unused_files(config.data, masking)}
    return config.model_copy(update=changes | {"data": config.data.model_copy(update=files)})


def _unused_masks(model: ModelConfig, masking: MaskingConfig | None) -> Iterator[tuple[str, str]]:
    """Of `masking`, with why nothing reads them."""
    if masking is None:
        return
    fields = [field for field in MaskingConfig.model_fields if field not in FRAMING]
    for field in fields if model.is_causal else _READ_BY:
        if getattr(masking, field) == _default(field):
            continue
        if model.is_causal:
            yield field, "with model.is_causal: nothing is masked where next tokens are learned"
        elif not set(masking.weighed_by().values()) & set(_READ_BY[field]):
            settings = [setting for setting, known in WEIGHING.items() if set(known) & set(_READ_BY[field])]
            yield field, f"without {' or '.join(settings)}: {' or '.join(_READ_BY[field])}"


def _default(field: str) -> Any:
    return MaskingConfig.model_fields[field].default


def _unused_files(data: DataConfig, masking: MaskingConfig | None) -> Iterator[tuple[str, str]]:
    """Of `data`, with why nothing reads them: files that say something of each id."""
    if data.id_weights is not None and (masking is None or not masking.reads_weights()):
        yield "id_weights", f"without {' or '.join(WEIGHING)}: weights"


# Encoders that learn next tokens, always or at first: what only masked tokens have is refused beside it.


_SHARE = "objective.schedule.causal_share"


def check_causal(
    model: ModelConfig,
    schedule: ObjectiveScheduleConfig | None,
    masking: MaskingConfig | None,
    training: TrainingConfig,
    tasks: TasksConfig | None,
) -> None:
    """ConfigError unless a model can be causal for a share of the run, and all else goes with that."""
    share = schedule.causal_share if schedule else None
    if share is not None and model.is_causal:
        whose = "with model.is_causal: true" if model.is_encoder() else f"of a {model.family}"
        raise ConfigError(_SHARE, f"be left out {whose}, where all steps are causal", got=share)
    if masking is not None and (model.is_causal or share is not None):
        _refuse_what_masked_tokens_have(masking, "model.is_causal" if model.is_causal else _SHARE)
    if model.is_encoder() and (model.is_causal or share is not None):
        why = "of a run whose encoder is causal at first or throughout: they are those of masked tokens"
        refuse("tasks", tasks and "given", why)
    if share is not None:
        why = f"with {_SHARE}: losses of next and of masked tokens cannot be compared"
        refuse("training.keep_best", training.keep_best, why)


def _refuse_what_masked_tokens_have(masking: MaskingConfig, setting: str) -> None:
    for field, value in given_subsets(masking):
        refuse(f"masking.{field}", value, f"with {setting}: nothing is masked where next tokens are learned")
    if masking.adapts():
        rule = f"be one that counts no misses of masked tokens with {setting}, by which there are none at first"
        raise ConfigError("masking.strategy", rule, got=masking.strategy)


def check_corrected(objective: ObjectiveConfig, masking: MaskingConfig | None, is_causal: bool) -> None:
    """ConfigError where masks prefer some ids: the chance of being a candidate, by which a corrected bias divides, is
    computed from the counts of the text, and would be wrong."""
    if objective.bias != "corrected" or masking is None or is_causal:
        return
    auxiliary = objective.auxiliary()
    by_auxiliary = auxiliary is not None and auxiliary.weighs_ids
    other = f"objective.{objective.auxiliary_name()}" if by_auxiliary else f"masking.strategy: {masking.strategy}"
    if by_auxiliary or masking.weighs_ids():
        rule = f"be another with {other}, by which ids are targets more or less often than in the text"
        raise ConfigError("objective.bias", rule, got="corrected", hint="take paper or once")


def check_id_files(data: DataConfig, masking: MaskingConfig | None) -> None:
    """ConfigError where one is missing."""
    if masking is not None and masking.reads_weights() and data.id_weights is None:
        rule = f"be given with {' or '.join(WEIGHING)}: weights"
        raise ConfigError("data.id_weights", rule, got="missing")


# Which settings of a run fit together, beyond what each of its sections knows of itself.


def check_fit(config: RunConfig) -> None:
    """ConfigError for the first settings that do not."""
    _check_rows(config)
    _check_masking(config)
    if config.masked_inputs:
        config.masked_inputs.check(config.model, config.data)
    check_causal(config.model, config.objective.schedule, config.masking, config.training, config.tasks)
    if auxiliary := config.objective.auxiliary():
        auxiliary.check(config)
    check_corrected(config.objective, config.masking, config.model.is_causal)
    _check_masking_schedule(config)
    check_id_files(config.data, config.masking)
    check_embedding(config)
    _check_elastic(config)
    _check_output(config)
    _check_schedule(config)
    _check_tasks(config)
    _check_resume(config)
    _check_init(config)


def _check_rows(config: RunConfig) -> None:
    model, data = config.model, config.data
    config.parallel.check(model, data.sequence_length)
    if data.sequence_length > model.max_positions:
        rule = f"be at most model.max_positions ({model.max_positions})"
        raise ConfigError("data.sequence_length", rule, got=data.sequence_length)
    if data.end_token >= model.vocab_size:
        raise ConfigError("data.end_token", f"be below model.vocab_size ({model.vocab_size})", got=data.end_token)


def _check_masking(config: RunConfig) -> None:
    masking, encoder = config.masking, config.model.is_encoder()
    if (masking is not None) != encoder:
        rule = "be given for an encoder" if encoder else "be left out of a decoder"
        got, hint = ("missing", "name mask_token, cls_token and sep_token") if encoder else ("given", "")
        raise ConfigError("masking", rule, got=got, hint=hint)
    if masking is None:
        return
    masking.check(config.model, config.data)
    check_token_subsets(masking, config.model, config.init, splits_rows=config.parallel.sequence)


def _check_elastic(config: RunConfig) -> None:
    batch = config.batch
    if not config.parallel.elastic:
        return
    if not batch.most_data_ranks(1):
        rule = f"be a multiple of batch.micro_size ({batch.micro_size}) under parallel.elastic"
        raise ConfigError("batch.global_size", rule, got=batch.global_size, hint="no number of ranks can serve it")
    if config.objective.group_samples == "data_parallel":
        rule = "not depend on the number of ranks under parallel.elastic"
        raise ConfigError("objective.group_samples", rule, got="data_parallel", hint="write a number of samples")


def _check_output(config: RunConfig) -> None:
    if config.output_dir is not None and is_remote(config.output_dir):
        hint = "a run trains on a disk, and is copied to training.mirror"
        raise ConfigError("output_dir", "be a folder of a disk", got=repr(config.output_dir), hint=hint)


def _check_schedule(config: RunConfig) -> None:
    steps, schedule = config.training.steps, config.schedule
    if config.objective.schedule:
        config.objective.schedule.check(steps)
    if schedule.warmup_steps + (schedule.decay_steps or 0) > steps:
        rule = f"leave its warm-up and decay within training.steps ({steps})"
        raise ConfigError("schedule.warmup_steps", rule, got=f"{schedule.warmup_steps} + {schedule.decay_steps or 0}")


def _check_masking_schedule(config: RunConfig) -> None:
    masking, objective = config.masking, config.objective
    if masking is None or masking.final_rate is None or not (objective.negatives or objective.bias == "once"):
        return
    counted = "negatives" if objective.negatives else "bias: once"
    rule = f"be left out with objective.{counted}, whose training-free head knows one number of targets"
    raise ConfigError("masking.final_rate", rule, got=masking.final_rate)


def _check_tasks(config: RunConfig) -> None:
    if not config.tasks:
        return
    if config.data.tokenizer is None:
        raise ConfigError("data.tokenizer", "name the tokenizer that `tasks` are read with", got="missing")
    if reason := config.why_headless_exports():
        raise ConfigError("tasks", f"be left out of a run that {reason}, whose exports have no head", got="given")


def _check_resume(config: RunConfig) -> None:
    settings = config.flat()
    for name in config.resume.allow:
        if not any(f"{setting}.".startswith(f"{name}.") for setting in settings):
            hint = "write optimizer.learning_rate, or schedule"
            raise ConfigError("resume.allow", "name settings or their sections", got=repr(name), hint=hint)


def _check_init(config: RunConfig) -> None:
    init = config.init
    if init is None or not init.copies_embedding():
        return
    if config.model.is_encoder():
        raise ConfigError("init.mode", "be `continue` or `table` for an encoder", got=repr(init.mode))
    if config.objective.head() != "trained":
        rule = "be `continue` or `table` unless the objective is an untied vanilla softmax"
        hint = "set objective.name=vanilla, which trains the head"
        raise ConfigError("init.mode", rule, got=repr(init.mode), hint=hint)
