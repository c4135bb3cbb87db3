"""Checks before training that the files which a run reads later fit its settings; without torch, also for dry runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from megahead.config.masking import MaskingConfig
from megahead.config.run import RunConfig
from megahead.config.training import TasksConfig
from megahead.errors import ConfigError, DataError, FieldError
from megahead.remote_files import is_remote, local_file

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
_ALL_SPECIAL_TOKENS = ("[MASK]", "<mask>", "[CLS]", "[SEP]", "[PAD]", "<pad>", "[UNK]", "<unk>")
"""Of one role each; `<s>` or `<eos>` both begins and ends texts of some models."""


def describe_files(config: RunConfig) -> tuple[str, str]:
    """The (name, value) line about missing files of a run."""
    paths = [path for _, path in _setting_paths(config)]
    remote = [path for path in paths if is_remote(path)]
    missing = [path for path in paths if path not in remote and not Path(path).exists()]
    unchecked = f"; {len(remote)} in stores, not looked for" if remote else ""
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
    """`check_run_files` for a dry run, without files that are missing here: they may be on the machine that trains."""
    paths = _setting_paths(config)
    check_run_files(config, {field for field, path in paths if is_remote(path) or not Path(path).exists()})


def check_custom_classes(config: RunConfig) -> None:
    """ConfigError unless each class that a setting names can be imported. Imports torch if there is one."""
    if config.masking is not None and config.masking.strategy_is_custom():
        from megahead.data.strategies import custom_strategy

        custom_strategy(config.masking.strategy)
    if config.objective.custom is not None:
        from megahead.objectives.auxiliary import auxiliary_class

        auxiliary_class(config.objective.custom)


def check_tokenizer(config: RunConfig) -> None:
    """UserError unless `data.tokenizer` can be opened, has at most the model's number of ids, and has the tokens of the
    settings, all of which exports need. Takes seconds for a million ids."""
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
    tokens = tokenizer.spellings(vocab_size)
    if config.masking is None or config.model.is_causal:
        _require_token("data.end_token", config.data.end_token, tokens)
    if config.masking is not None:
        _check_special_tokens(config.masking, path, tokens)
        if config.masking.strategy == "whole_word":
            bytes_of_ids(path, vocab_size)


def find_task_files(config: TasksConfig, encoder: bool) -> dict[str, Path]:
    """The run's task files by task (`task_files`). Errors name settings instead of the command's options."""
    from megahead.evaluate.harness_tasks import require_for_kind, task_files

    paths = config.data, config.cloze, config.text, config.items, config.articles
    folders = [None if path is None else Path(path) for path in paths]
    try:
        require_for_kind(config.names, encoder=encoder)
        return task_files(config.names, *folders)
    except FieldError as error:
        raise FieldError(_SETTING_BY_OPTION[error.field], error.rule, got=error.got, hint=error.hint) from None


def _setting_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(setting, path) of each file that a run reads."""
    settings = config.flat()
    prefixes = [part.prefix for part in config.data.parts()] + [config.data.validation or ""]
    yield from (("data", f"{prefix}{suffix}") for prefix in prefixes if prefix for suffix in (".bin", ".idx"))
    if config.tasks and config.tasks.items:
        yield "tasks.items", f"{config.tasks.items}.idx"
    names = ["data.tokenizer", "data.id_weights", "init.from_checkpoint", "init.from_hf"]
    names += ["tasks.data", "tasks.cloze", "tasks.text", "tasks.articles"]
    yield from ((name, settings[name]) for name in names if settings.get(name) is not None)


def _check_special_tokens(masking: MaskingConfig, path: str, tokens: list[str | None]) -> None:
    """ConfigError for a special token whose id is text or another special token, although the tokenizer has it."""
    for name, expected in _SPECIAL_TOKENS.items():
        id_ = getattr(masking, name)
        _require_token(f"masking.{name}", id_, tokens)
        existing = [token for token in expected if token in tokens]
        if existing and tokens[id_] not in expected and (tokens[id_] in _ALL_SPECIAL_TOKENS or _is_text(path, id_)):
            rule = f"be the id of {existing[0]} in data.tokenizer ({tokens.index(existing[0])})"
            raise ConfigError(f"masking.{name}", rule, got=f"{id_}, which is {tokens[id_]}")


def _is_text(path: str, id_: int) -> bool:
    """Whether the id is known to be no special token."""
    from megahead.data.vocabulary_map import bytes_of_ids

    try:
        return bytes_of_ids(path, id_ + 1)[id_] is not None
    except DataError:  # unknown for this tokenizer
        return False


def _require_token(field: str, id_: int, tokens: list[str | None]) -> None:
    """ConfigError if `tokens`, the tokenizer's by id, has none for `id_`."""
    if tokens[id_] is None:
        last = max(index for index, token in enumerate(tokens) if token is not None)
        raise ConfigError(field, f"be an id of data.tokenizer, whose last is {last}", got=id_)
