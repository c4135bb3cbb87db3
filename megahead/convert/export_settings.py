"""An export's settings: config.json, generation_config.json, and the tokenizer's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megahead.convert.export_target import ExportTarget
from megahead.convert.tokenizer_files import write_encoder_tokenizer, write_tokenizer


def write_settings(folder: Path, target: ExportTarget) -> Path | None:
    """Writes config.json, generation_config.json and the tokenizer files; returns the tokenizer's source."""
    model, head, family = target.model, target.head, target.family
    config, end = model.config, model.config.data.end_token
    tokenizer = model.tokenizer()
    if config.masking is not None:
        first, last = config.masking.cls_token, config.masking.sep_token
        ids = {"pad_token_id": 0, "bos_token_id": first, "cls_token_id": first}
        ids |= {"eos_token_id": last, "sep_token_id": last}
        ids |= {} if tokenizer is None else write_encoder_tokenizer(tokenizer, folder, config)
        ids |= {"eos_token_id": end} if config.model.is_causal else {}
    else:
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        ids |= {} if tokenizer is None else write_tokenizer(tokenizer, folder, config)
    shared = {
        "architectures": [family.with_head if target.has_head() else family.backbone],
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": head.is_embedding(),
    }
    origin = {
        "run": config.name,
        "head": head.name,
        "objective": config.objective.model_dump(),
        "step": model.checkpoint.step,
        "tokens": model.checkpoint.state.get("tokens"),
    }
    content = family.config(head.shape(config.model)) | shared | ids
    write_json(folder / "config.json", {**content, "dtype": target.dtype, "megahead": origin})
    if target.has_head() and not target.guesses_masked():
        write_json(folder / "generation_config.json", ids)
    return tokenizer


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, for people too."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
