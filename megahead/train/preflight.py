"""Describes and checks a run before it trains, without torch: its banner, and whether its files fit its settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from megahead.config.base import require
from megahead.config.data import DataConfig
from megahead.config.embedding import dense_embedding_lr_ratio, describe_embedding
from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.plan import RunPlan, compile_conflict, phase_names, phases_of
from megahead.config.run import RunConfig
from megahead.config.token_subsets import describe_token_subsets
from megahead.config.training import TasksConfig
from megahead.data.indexed import IndexedDataset, require_same_tokenizer
from megahead.errors import ConfigError, DataError, FieldError
from megahead.estimate import RankMemory, candidate_rows, rank_memory, run_flops, run_parameters
from megahead.hf.other_programs import serving_support
from megahead.remote_files import is_remote, local_file
from megahead.wording import GIB, format_gib, pluralize

# Lines that describe a run, for the banner (which a run prints at its start) and for a dry run.


def describe_run(plan: RunPlan, group_samples: int | None = None) -> list[tuple[str, str]]:
    """(name, value) lines of the run. `group_samples`: samples in a candidate group (whose targets are candidates for
    each other) of a resumed run; by default the config's."""
    config, steps = plan.config, plan.config.training.steps
    batch, schedule = config.batch, config.schedule
    group_samples = group_samples or plan.group_samples()
    warmup_steps = schedule.num_warmup_steps(steps)
    warm_up = f"{pluralize(warmup_steps, 'step')} of warm-up" if warmup_steps else "no warm-up"
    precision = f"{config.engine.precision}{' (by auto)' if plan.precision_was_auto else ''}"
    decay = "" if schedule.name == "constant" else f", to {schedule.final_ratio:.0%} of it"
    return [
        ("run", f"{config.name} -> {config.folder()}"),
        ("model", _shape(config.model)),
        ("parameters", _parameters(config)),
        ("objective", _objective(config, group_samples)),
        *describe_phases(config),
        (
            "batch",
            f"{pluralize(batch.global_size, 'row')} x {config.data.sequence_length} = "
            f"{pluralize(config.tokens_per_step(), 'token')} a step; {pluralize(batch.micro_size, 'row')} x "
            f"{plan.accumulation_steps} accumulation x {pluralize(plan.data_ranks, 'data rank')}",
        ),
        ("length", f"{pluralize(steps, 'step')}, {pluralize(steps * config.tokens_per_step(), 'token')}"),
        ("schedule", f"{schedule.name}, {warm_up}, peak {config.optimizer.learning_rate:g}{decay}"),
        *_learning_rates(config),
        *describe_embedding(config, plan.ranks),
        ("mesh", f"{config.parallel.tensor} tensor x {pluralize(plan.data_ranks, 'data rank')}"),
        ("engine", f"ZeRO {plan.zero_stage}, {precision}"),
        ("memory", _memory(rank_memory(plan))),
        ("serving", serving_support(phases_of(config)[-1].config)),
    ]


def describe_assumed_device(plan: RunPlan) -> tuple[str, str]:
    """The device that a dry run assumes, since it does not import torch to detect one."""
    if plan.config.engine.device == "cpu":
        return "on", f"{plan.ranks} x cpu"
    return "on", f"{plan.ranks} x cuda, assumed (engine.device: cpu plans for processors)"


LAUNCH_MILLISECONDS_PER_LAYER = {False: 4.2, True: 2.8}
"""The host's time to launch a GPU's kernels for one micro-batch, by whether blocks are compiled: computed from the
number of operators and a server processor's time per operator."""

TYPICAL_UTILIZATION = 0.5
"""The share of its peak that a device reaches if it does not wait for the host."""


def describe_launches(plan: RunPlan, device_peak: float | None) -> list[tuple[str, str]]:
    """The note about micro-batches whose kernels take longer to launch than to compute; none if the device's peak FLOPS
    are unknown."""
    if device_peak is None:
        return []
    config, ranks = plan.config, plan.data_ranks
    tokens = config.batch.micro_size * config.data.sequence_length
    flops = run_flops(config, candidate_rows(config, ranks), ranks).total * tokens / config.parallel.tensor
    compute_ms = 1000 * flops / (TYPICAL_UTILIZATION * device_peak)
    is_compiled = bool(config.engine.compile) and not compile_conflict(config, plan.zero_stage)
    launch_ms = LAUNCH_MILLISECONDS_PER_LAYER[is_compiled] * config.model.num_layers
    if compute_ms >= launch_ms:
        return []
    fix = "a larger batch.micro_size"
    if config.objective.name == "headless":
        fix += f" with objective.group_samples={plan.group_samples()} keeps the candidates and"
    problem = f"a micro-batch takes the device about {compute_ms:.1f} ms, and the host about {launch_ms:.0f} to launch"
    return [("note", f"{problem}: {fix} fills the device")]


def describe_phases(config: RunConfig) -> list[tuple[str, str]]:
    """The line with each phase's objective and steps, if there is more than one phase."""
    phases = phases_of(config)
    pairs = zip(phase_names(phases), phases, strict=True)
    parts = [f"{name} for {pluralize(len(phase.steps), 'step')}" for name, phase in pairs]
    return [("phases", ", then ".join(parts))] if len(phases) > 1 else []


def _learning_rates(config: RunConfig) -> list[tuple[str, str]]:
    """The line about parameters with their own optimizer or learning rate."""
    optimizer = config.optimizer
    embedding_ratio, parts = dense_embedding_lr_ratio(config), []
    if optimizer.name == "muon":
        ratio = optimizer.muon.learning_rate_ratio
        parts.append(f"muon for the matrices of blocks at {ratio:g} times the learning rate, adamw for the rest")
    if embedding_ratio != 1:
        head = " and head" if phases_of(config)[-1].config.objective.trains_head() else ""
        parts.append(f"{embedding_ratio:g} times the learning rate for embedding{head}")
    return [("optimizer", "; ".join(parts))] if parts else []


def _shape(model: ModelConfig) -> str:
    layers, heads = pluralize(model.num_layers, "layer"), pluralize(model.num_heads, "head")
    heads += f" ({model.key_heads()} of keys)" if model.key_heads() != model.num_heads else ""
    table = f"vocabulary {model.vocab_size:,} (table of {model.padded_vocab_size():,})"
    return f"{model.family}, {layers} x {model.hidden_size}, {heads}, {table}"


def _memory(memory: RankMemory) -> str:
    states = memory.weights + memory.gradients + memory.optimizer
    parts = {"states": states, "buffers": memory.buffers, "activations": memory.activations, "loss": memory.loss}
    parts |= {name: size for name, size in (("table", memory.table), ("graphs", memory.graphs)) if size}
    sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    offloaded = f"; {memory.host / GIB:.2f} on the host" if memory.host else ""
    return f"about {format_gib(memory.total)} a rank ({sizes}{offloaded})"


def _parameters(config: RunConfig) -> str:
    counts = run_parameters(config)
    parts = [f"{counts.body:,} body", f"{counts.embedding:,} embedding"]
    parts += [f"{counts.head:,} head"] if counts.head else []
    parts += [f"{counts.generator:,} generator"] if counts.generator else []
    return f"{counts.total:,} ({', '.join(parts)})"


def _objective(config: RunConfig, group_samples: int) -> str:
    objective = config.objective
    parts = ["headless" if objective.name == "headless" else f"vanilla, {'tied' if objective.tied else 'untied'}"]
    if objective.name == "vanilla":
        parts.append(f"all {config.model.vocab_size:,} ids")
        parts += ["with a bias"] if objective.output_bias else []
    else:
        targets = pluralize(group_samples * config.targets_per_row(), "target")
        parts.append(f"candidates from {pluralize(group_samples, 'row')} ({targets})")
        parts += ["of a table of their own"] if objective.candidates == "own" else []
        parts += [f"bias {objective.bias}"] if objective.bias != "paper" else []
        parts += [pluralize(objective.negatives, f"{objective.negatives_from} negative")] if objective.negatives else []
        parts += [f"at most {objective.max_candidates:,}"] if objective.max_candidates else []
        parts += [f"{objective.vanilla_weight:g} vanilla"] if objective.vanilla_weight else []
    parts += _masking(config.model, config.masking) if config.masking else []
    if config.masked_inputs is not None:
        parts.append(f"{config.masked_inputs.share:.0%} of the inputs masked")
    parts += [f"scored by {objective.score}"] if objective.score != "dot" else []
    auxiliary = objective.auxiliary()
    parts += [described] if auxiliary is not None and (described := auxiliary.describe()) else []
    if objective.learned_temperature or objective.temperature != 1 or objective.score != "dot":
        parts.append(f"temperature {objective.temperature:g}{', learned' if objective.learned_temperature else ''}")
    return ", ".join(parts)


def _masking(model: ModelConfig, masking: MaskingConfig) -> list[str]:
    if model.is_causal:
        return ["next tokens by causal attention"]
    parts = ["masked diffusion" if masking.diffusion else f"{masking.rate:.0%} of the tokens masked"]
    parts += [f"{masking.final_rate:.0%} at the last step"] if masking.final_rate else []
    parts += [f"by {masking.strategy}"] if masking.strategy != "uniform" else []
    return [*parts, *describe_token_subsets(model, masking)]


# Checks that the files which a run reads later fit its settings.


_SETTING_BY_OPTION = {
    "--tasks": "tasks.names",
    "--data": "tasks.data",
    "--cloze": "tasks.cloze",
    "--text": "tasks.text",
    "--items": "tasks.items",
    "--articles": "tasks.articles",
}
_SPECIAL_TOKENS = {
    "mask_token": ("[MASK]", "<mask>"),
    "cls_token": ("[CLS]", "<s>", "<bos>"),
    "sep_token": ("[SEP]", "</s>", "<eos>"),
}
"""Expected tokens by field of `masking`; checked if the tokenizer has one of them."""
_SINGLE_ROLE_TOKENS = ("[MASK]", "<mask>", "[CLS]", "[SEP]", "[PAD]", "<pad>", "[UNK]", "<unk>")
"""Special tokens with one role; in some models `<s>` or `<eos>` both begins and ends a text."""


def describe_files(config: RunConfig, *, resumes: bool = False) -> tuple[str, str]:
    """The (name, value) line about missing files of a run; one that `resumes` does not read those of `init`."""
    paths = [path for field, path in _setting_paths(config) if not (resumes and field.startswith("init."))]
    remote = [path for path in paths if is_remote(path)]
    missing = [path for path in paths if path not in remote and not Path(path).exists()]
    unchecked = f"; {len(remote)} in remote stores, not checked" if remote else ""
    existing = f"all {len(paths) - len(remote)} exist"
    return "files", f"missing: {', '.join(missing)}{unchecked}" if missing else f"{existing}{unchecked}"


def check_run_files(config: RunConfig, missing: Collection[str] = ()) -> None:
    """UserError unless the run can use its tokenizer, its tasks' files and its custom classes. Skips files of the
    settings in `missing`."""
    check_custom_classes(config)
    if "data.tokenizer" not in missing:
        check_tokenizer(config)
    if config.tasks is not None and not {*_SETTING_BY_OPTION.values()}.intersection(missing):
        find_task_files(config.tasks, config.model.is_encoder())


def check_available_files(config: RunConfig) -> None:
    """`check_run_files` and `open_compared` for a dry run, without files that are missing here: they may be on the
    machine that trains."""
    paths = _setting_paths(config)
    missing = [(field, path) for field, path in paths if is_remote(path) or not Path(path).exists()]
    check_run_files(config, {field for field, _ in missing})
    open_compared(config, {path for _, path in missing})


def open_compared(config: RunConfig, missing: Collection[str] = ()) -> list[IndexedDataset]:
    """The training datasets in the config's order, then that of validation, if any; without those that have a file in
    `missing`.

    ConfigError if the vocabulary of one is larger than the model's, or its end token differs. DataError if datasets, or
    `data.tokenizer`, are known to have different tokenizers. An identity tells tokenizers apart that give other ids; it
    is None for a dataset that was made without recording it.
    """
    datasets, identities = [], {}
    for field, prefix in _dataset_prefixes(config.data):
        if not {f"{prefix}.bin", f"{prefix}.idx"}.intersection(missing):
            datasets.append(dataset := _open_dataset(config, prefix, field))
            identities[f"`{field}` ({dataset.prefix})"] = dataset.tokenizer_identity()
    tokenizer = config.data.tokenizer
    if tokenizer is not None and tokenizer not in missing and any(identities.values()):
        from megahead.data.tokenizer import Tokenizer

        identities["`data.tokenizer`"] = Tokenizer(local_file(tokenizer)).identity()
    require_same_tokenizer(identities)
    return datasets


def _open_dataset(config: RunConfig, prefix: str, field: str) -> IndexedDataset:
    """The dataset at `prefix`; ConfigError if its vocabulary is larger than the model's, or its end token differs."""
    dataset = IndexedDataset(prefix)
    if dataset.info is not None and dataset.info.vocab_size > config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"be at least that of {field} ({dataset.info.vocab_size:,})",
            got=f"{config.model.vocab_size:,}",
        )
    end, end_token = dataset.info and dataset.info.end_token, config.data.end_token
    rule = f"be the id that closes documents of {field} ({end})"
    require(
        end in (None, end_token), "data.end_token", rule, got=end_token, hint="leave it out, or tokenize the text again"
    )
    dataset.expect_ids_below(config.model.vocab_size)
    return dataset


def check_custom_classes(config: RunConfig) -> None:
    """ConfigError unless each class that a setting names can be imported. Imports torch if there is one."""
    if config.masking is not None and config.masking.strategy_is_custom():
        from megahead.data.strategies import custom_strategy

        custom_strategy(config.masking.strategy)
    if config.objective.custom is not None:
        from megahead.objectives.auxiliary import auxiliary_class

        auxiliary_class(config.objective.custom)


def check_tokenizer(config: RunConfig) -> None:
    """UserError unless `data.tokenizer` can be opened, has at most the model's number of ids, and has the tokens that
    settings name: exports need all this. Takes seconds for a million ids."""
    from megahead.data.tokenizer import load_tokenizer
    from megahead.data.vocabulary_map import bytes_of_ids

    path, vocab_size = config.data.tokenizer, config.model.vocab_size
    if path is None:
        return
    if not Path(local_file(path)).is_file():
        raise ConfigError("data.tokenizer", "name a readable file", got=path, hint="or leave it out")
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        rule = f"be at least the number of ids of data.tokenizer ({tokenizer.vocab_size:,})"
        raise ConfigError("model.vocab_size", rule, got=f"{vocab_size:,}", hint="or name the text's own tokenizer")
    tokenizer.content()  # raises DataError if it cannot give the tokenizer.json of exports
    tokens = tokenizer.spellings(vocab_size)
    if config.masking is None or config.model.is_causal:
        _require_token("data.end_token", config.data.end_token, tokens)
    if config.masking is not None:
        _check_special_tokens(config.masking, path, tokens)
        if config.masking.strategy == "whole_word":
            bytes_of_ids(path, vocab_size)


def find_task_files(config: TasksConfig, encoder: bool) -> dict[str, Path]:
    """The run's task files by task (`task_files`). Errors name settings instead of the command's options."""
    from megahead.evaluate.harness_tasks import require_model_kind, task_files

    paths = config.data, config.cloze, config.text, config.items, config.articles
    folders = [None if path is None else Path(path) for path in paths]
    try:
        require_model_kind(config.names, encoder=encoder)
        return task_files(config.names, *folders)
    except FieldError as error:
        raise FieldError(_SETTING_BY_OPTION[error.field], error.rule, got=error.got, hint=error.hint) from None


def _dataset_prefixes(data: DataConfig) -> Iterator[tuple[str, str]]:
    """(setting, prefix) of each dataset."""
    yield from (("data.train", part.prefix) for part in data.parts())
    if data.validation is not None:
        yield "data.validation", data.validation


def _setting_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(setting, path) of each file that a run reads."""
    settings = config.flat()
    for field, prefix in _dataset_prefixes(config.data):
        yield from ((field, f"{prefix}{suffix}") for suffix in (".bin", ".idx"))
    if config.tasks and config.tasks.items:
        yield "tasks.items", f"{config.tasks.items}.idx"
    names = ["data.tokenizer", "data.id_weights", "init.from_checkpoint", "init.from_hf"]
    names += ["tasks.data", "tasks.cloze", "tasks.text", "tasks.articles"]
    yield from ((name, settings[name]) for name in names if settings.get(name) is not None)


def _check_special_tokens(masking: MaskingConfig, path: str, tokens: list[str | None]) -> None:
    """ConfigError if the id of a setting is that of ordinary text or of another special token, although the tokenizer
    has the expected token."""
    for name, expected in _SPECIAL_TOKENS.items():
        id_ = getattr(masking, name)
        _require_token(f"masking.{name}", id_, tokens)
        existing = [token for token in expected if token in tokens]
        if existing and tokens[id_] not in expected and (tokens[id_] in _SINGLE_ROLE_TOKENS or _is_text(path, id_)):
            rule = f"be the id of {existing[0]} in data.tokenizer ({tokens.index(existing[0])})"
            raise ConfigError(f"masking.{name}", rule, got=f"{id_}, which is {tokens[id_]}")


def _is_text(path: str, id_: int) -> bool:
    """Whether the id is known to be of ordinary text."""
    from megahead.data.vocabulary_map import bytes_of_ids

    try:
        return bytes_of_ids(path, id_ + 1)[id_] is not None
    except DataError:  # unknown for this tokenizer
        return False


def _require_token(field: str, id_: int, tokens: list[str | None]) -> None:
    """ConfigError if `tokens` (those of the tokenizer, by id) has no token for `id_`."""
    if tokens[id_] is None:
        last = max(index for index, token in enumerate(tokens) if token is not None)
        raise ConfigError(field, f"be an id of data.tokenizer, whose last is {last}", got=id_)
