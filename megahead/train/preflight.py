"""What a run reads late, opened and compared with its settings before it begins; without torch, for dry runs too."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from megahead.config.masking import MaskingConfig
from megahead.config.run import RunConfig
from megahead.config.training import TasksConfig
from megahead.errors import ConfigError, DataError, FieldError
from megahead.remote_files import is_remote, local_file

_OPTIONS = {"--tasks": "tasks.names", "--data": "tasks.data", "--cloze": "tasks.cloze", "--text": "tasks.text"}
_SPELLED = {"mask_token": ("[MASK]", "<mask>"), "cls_token": ("[CLS]",), "sep_token": ("[SEP]",)}
"""By fields of `masking`: how a tokenizer spells the token that it must be, where it has one of these."""
_OF_OTHERS = ("[MASK]", "<mask>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")


def describe_files(config: RunConfig) -> tuple[str, str]:
    """(name, value): which of the files that a run would read are missing."""
    named = [path for _, path in _named(config)]
    remote = [name for name in named if is_remote(name)]
    missing = [name for name in named if name not in remote and not Path(name).exists()]
    unseen = f"; {len(remote)} in stores, not looked for" if remote else ""
    found = f"all {len(named) - len(remote)} exist"
    return "files", f"missing: {', '.join(missing)}{unseen}" if missing else f"{found}{unseen}"


def check_run_files(config: RunConfig, missing: Collection[str] = ()) -> None:
    """UserError unless the run can use its tokenizer and the files of its tasks, which it reads at its end, and the
    classes of one's own. Files of the settings in `missing` are not checked."""
    check_custom_classes(config)
    if "data.tokenizer" not in missing:
        check_tokenizer(config)
    if config.tasks is not None and not {*_OPTIONS.values()}.intersection(missing):
        find_task_files(config.tasks, config.model.is_encoder())


def check_available_files(config: RunConfig) -> None:
    """The same for a dry run: what is not on this machine may be on the one that trains, and is not checked."""
    check_run_files(config, {field for field, path in _named(config) if is_remote(path) or not Path(path).exists()})


def check_custom_classes(config: RunConfig) -> None:
    """ConfigError unless each class that a setting names can be imported and is one; torch is imported for these."""
    if config.masking is not None and config.masking.strategy_is_custom():
        from megahead.data.strategies import custom_strategy

        custom_strategy(config.masking.strategy)
    if config.objective.custom is not None:
        from megahead.objectives.auxiliary import auxiliary_kind

        auxiliary_kind(config.objective.custom)


def check_tokenizer(config: RunConfig) -> None:
    """UserError unless `data.tokenizer` can be opened, has no more ids than the model, and has the tokens that the
    settings name: what its exports need. Takes seconds for a million ids."""
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
    tokenizer.content()
    spelled = tokenizer.spellings(vocab_size)
    if config.masking is None or config.model.is_causal:
        _require_token("data.end_token", config.data.end_token, spelled)
    if config.masking is not None:
        _check_special(config.masking, path, spelled)
        if config.masking.strategy == "whole_word":
            bytes_of_ids(path, vocab_size)


def find_task_files(config: TasksConfig, encoder: bool) -> dict[str, Path]:
    """`task_files` for a run's settings, whose errors name the settings and not the command's options."""
    from megahead.evaluate.harness_tasks import require_for_encoder, task_files

    places = [None if place is None else Path(place) for place in (config.data, config.cloze, config.text)]
    try:
        if encoder:
            require_for_encoder(config.names)
        return task_files(config.names, *places)
    except FieldError as error:
        raise FieldError(_OPTIONS[error.field], error.rule, got=error.got, hint=error.hint) from None


def _named(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(setting, path) of the files that a run would read."""
    settings = config.flat()
    prefixes = [part.prefix for part in config.data.parts()] + [config.data.validation or ""]
    yield from (("data", f"{prefix}{ending}") for prefix in prefixes if prefix for ending in (".bin", ".idx"))
    others = ("data.tokenizer", "data.id_weights", "init.from_checkpoint", "init.from_hf")
    yield from (
        (name, settings[name])
        for name in (*others, "tasks.data", "tasks.cloze", "tasks.text")
        if settings.get(name) is not None
    )


def _check_special(masking: MaskingConfig, path: str, spelled: list[str | None]) -> None:
    """ConfigError where an id is text or has another role, although there is the token that its field asks for."""
    for name, own in _SPELLED.items():
        id_ = getattr(masking, name)
        _require_token(f"masking.{name}", id_, spelled)
        there = [token for token in own if token in spelled]
        if there and spelled[id_] not in own and (spelled[id_] in _OF_OTHERS or _is_text(path, id_)):
            rule = f"be the id of {there[0]} in data.tokenizer ({spelled.index(there[0])})"
            raise ConfigError(f"masking.{name}", rule, got=f"{id_}, which is {spelled[id_]}")


def _is_text(path: str, id_: int) -> bool:
    """Whether it is known to be no special token."""
    from megahead.data.vocabulary_map import bytes_of_ids

    try:
        return bytes_of_ids(path, id_ + 1)[id_] is not None
    except DataError:  # nor what others stand for
        return False


def _require_token(field: str, id_: int, spelled: list[str | None]) -> None:
    if spelled[id_] is None:
        last = max(known for known, token in enumerate(spelled) if token is not None)
        raise ConfigError(field, f"be an id of data.tokenizer, whose last is {last}", got=id_)
