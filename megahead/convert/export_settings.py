"""An export's settings: config.json, generation_config.json, and the tokenizer's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megahead.config import ModelConfig
from megahead.convert.export_target import ExportTarget
from megahead.convert.kept_settings import CONFIG, GENERATION, KeptSettings
from megahead.convert.tokenizer_files import write_encoder_tokenizer, write_tokenizer


def write_settings(folder: Path, target: ExportTarget) -> Path | None:
    """Writes config.json, generation_config.json and the tokenizer files; returns the tokenizer's source.

    Those of the folder that a run began from stay as they are, but for what the run changed; where it reads or ends
    texts in another way, and in all other runs, special tokens are those of its config.
    """
    model = target.model
    tokenizer, kept = model.tokenizer(), KeptSettings.of_run(model.run_folder())
    if kept is not None and not kept.hold_for(model.config, tokenizer):
        kept = None
    if kept is None:
        ids = _files_of_run(folder, target, tokenizer)
        content, generation = _of_run(target) | ids, ids
    else:
        kept.write(folder)
        if tokenizer is None and (folder / "tokenizer.json").is_file():
            tokenizer = model.run_folder().published
        content, generation = _of_kept(target, kept), kept.content(GENERATION)
    write_json(folder / CONFIG, content)
    if target.has_head() and not target.guesses_masked() and generation:
        write_json(folder / GENERATION, generation)
    return tokenizer


def _files_of_run(folder: Path, target: ExportTarget, tokenizer: Path | None) -> dict[str, int]:
    """Writes the tokenizer's files of a run that began from no folder; returns the ids of special tokens."""
    config, end = target.model.config, target.model.config.data.end_token
    if config.masking is None:
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        return ids | ({} if tokenizer is None else write_tokenizer(tokenizer, folder, config))
    first, last = config.masking.cls_token, config.masking.sep_token
    ids = {"pad_token_id": 0, "bos_token_id": first, "cls_token_id": first}
    ids |= {"eos_token_id": last, "sep_token_id": last}
    ids |= {} if tokenizer is None else write_encoder_tokenizer(tokenizer, folder, config)
    return ids | ({"eos_token_id": end} if config.model.is_causal else {})


def _of_run(target: ExportTarget) -> dict[str, Any]:
    """config.json without special tokens."""
    model, config, head, family = target.model, target.model.config, target.head, target.family
    origin = {
        "run": config.name,
        "head": head.name,
        "objective": config.objective.model_dump(),
        "step": model.checkpoint.step,
        "tokens": model.checkpoint.state.get("tokens"),
    }
    return {
        **family.config(head.shape(config.model)),
        "architectures": [family.with_head if target.has_head() else family.backbone],
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": head.is_embedding(),
        "dtype": target.dtype,
        "megahead": origin,
    }


def _of_kept(target: ExportTarget, kept: KeptSettings) -> dict[str, Any]:
    """config.json as it was, with what the run changed."""
    before, now = kept.content(CONFIG), _of_run(target)
    if before["model_type"] != now["model_type"]:  # a class that has another head, or what a Mistral goes out as
        return now | {name: id_ for name, id_ in before.items() if name.endswith("_token_id")}
    then = target.family.config(ModelConfig(**target.family.settings(before)))
    changed = {name: value for name, value in now.items() if name not in then or then[name] != value}
    if not target.has_head() and "tie_word_embeddings" in before:
        del changed["tie_word_embeddings"]  # there is nothing to tie
    if "torch_dtype" in before:
        changed["torch_dtype"] = target.dtype
    return before | changed


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, for people too."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
