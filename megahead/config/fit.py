"""Which settings of a run fit together, beyond what each of its sections knows of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megahead.config.causal import check_causal
from megahead.config.corrected import check_corrected
from megahead.config.detection import check_detection
from megahead.config.embedding import refusal_of_decay
from megahead.config.id_files import check_id_files
from megahead.config.shorter_rows import check_shorter_rows
from megahead.errors import ConfigError
from megahead.far.address import is_far

if TYPE_CHECKING:
    from megahead.config.run import RunConfig


def check_fit(config: RunConfig) -> None:
    """ConfigError for the first settings that do not."""
    _check_rows(config)
    _check_masking(config)
    if config.masked_inputs:
        config.masked_inputs.check(config.model, config.data)
    check_causal(config.model, config.objective.schedule, config.masking, config.training, config.tasks)
    check_detection(config.objective, config.model, config.masking, config.training, config.init)
    if config.objective.phrases:
        config.objective.phrases.check(config.model, config.masking, config.batch)
    check_corrected(config.objective, config.masking, config.model.is_causal)
    _check_course_of_masks(config)
    check_id_files(config.data, config.masking, config.objective)
    _check_table(config)
    _check_elastic(config)
    _check_output(config)
    _check_course(config)
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
    check_shorter_rows(masking, config.model, config.init, config.parallel.sequence)


def _check_table(config: RunConfig) -> None:
    table, decay, refusal = config.optimizer.table, refusal_of_decay(config.optimizer), config.refusal_of_rows()
    if decay is not None and table.learning_rate_ratio != 1:
        raise decay
    if config.engine.embedding == "rows" and refusal is not None:
        raise refusal.error
    if table.rule != "adamw" and not config.in_rows():
        raise ConfigError("optimizer.table.rule", "be adamw where the embedding is dense", got=table.rule)
    if table.rule != "adamw" and config.objective.ends_vanilla():
        rule = "be adamw with objective.schedule.vanilla_share, by which all rows end"
        raise ConfigError("optimizer.table.rule", rule, got=table.rule)


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
    if config.output_dir is not None and is_far(config.output_dir):
        hint = "a run trains on a disk, and is copied to training.mirror"
        raise ConfigError("output_dir", "be a folder of a disk", got=repr(config.output_dir), hint=hint)


def _check_course(config: RunConfig) -> None:
    steps, schedule = config.training.steps, config.schedule
    if config.objective.schedule:
        config.objective.schedule.check(steps)
    if schedule.warmup_steps + (schedule.decay_steps or 0) > steps:
        rule = f"leave its warm-up and decay within training.steps ({steps})"
        raise ConfigError("schedule.warmup_steps", rule, got=f"{schedule.warmup_steps} + {schedule.decay_steps or 0}")


def _check_course_of_masks(config: RunConfig) -> None:
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
