"""From a Hugging Face folder (of a kind in `families`) to a checkpoint of ours that a run can start from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megahead.checkpoint import save_checkpoint
from megahead.config import RunConfig, config_from_dict
from megahead.convert.families import Family, family_named
from megahead.convert.source import EMBEDDING, HEAD, MASK_HEAD
from megahead.corpus import load_tokenizer
from megahead.distributed import Group
from megahead.errors import CheckpointError
from megahead.files import staged_folder
from megahead.pretraining import weight_shapes
from megahead.run_folder import RunFolder


def from_hf(model_dir: Path, output_dir: Path) -> Path:
    """Writes the weights of `model_dir` as OUTPUT/checkpoints/step-00000000, and its tokenizer beside; returns OUTPUT.

    Good for `init.from_checkpoint`, for export and for evaluation: it holds no optimizer state and no text. The
    model is headless, tied or untied vanilla, as the folder is. The table is padded with zero rows to a multiple
    of 1,024. A pooler is left out. Raises a UserError for a folder that is none of these in safetensors, leaving
    nothing behind.
    """
    files = weight_files(model_dir)
    content = read_settings(model_dir)
    family = family_named(content)
    theirs = {ours: name for name in files if (ours := family.our_name(name)) is not None}
    has_head = any(name == HEAD or name.startswith(MASK_HEAD) for name in theirs)
    config = _config(model_dir, content, family, has_head=has_head)
    with staged_folder(output_dir) as staged:
        run = RunFolder(staged)
        save_checkpoint(
            run.checkpoints,
            0,
            _tensors(model_dir, files, theirs, config),
            state={"step": 0, "tokens": 0},
            config=config.model_dump(mode="json"),
            group=Group(),
            keep=1,
        )
        tokenizer = model_dir / "tokenizer.json"
        if tokenizer.is_file():
            shutil.copyfile(tokenizer, run.tokenizer)
    return output_dir


def weight_files(model_dir: Path) -> dict[str, Path]:
    """Which file holds each stored tensor; CheckpointError where there are no safetensors.

    Those that transformers reads: model.safetensors, else what the index lists, else all; others may lie beside them.
    """
    found = {}
    for path in _files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"`{path}` must be a safetensors file, but cannot be read ({error}).") from None
    if not found and any(model_dir.rglob("layer_*-model_*-model_states.pt")):
        raise CheckpointError(
            f"`{model_dir}` must be a Hugging Face folder, but is a checkpoint of the GPT-NeoX library in layer files; "
            "convert it with that library's tools/ckpts/convert_neox_to_hf.py and import what it writes."
        )
    if not found:
        raise CheckpointError(
            f"`{model_dir}` must hold model weights as *.safetensors, but has none; "
            "for other formats, save it again with transformers' save_pretrained."
        )
    return found


def _files(model_dir: Path) -> list[Path]:
    index, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(model_dir.glob("*.safetensors"))
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [model_dir / name for name in sorted(set(named))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"`{index}` must list the weights' files, but cannot be read as that.") from None


def _config(model_dir: Path, content: Mapping[str, Any], family: Family, *, has_head: bool) -> RunConfig:
    """A run's config around the folder's model; only model, objective and special tokens mean something."""
    headless = not has_head and family.with_head not in (content.get("architectures") or [])
    settings = family.settings(content)
    encoder = settings.get("family") == "bert"
    tied = bool(content.get("tie_word_embeddings", encoder))
    masking = _masking(model_dir) if encoder else None
    tree = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", model_dir.resolve().name) or "imported",
        "model": settings,
        "masking": masking,
        "data": {
            "train": "(weights imported, no text)",
            "sequence_length": content.get("max_position_embeddings", 2048),
            "end_token": _end_token(content) or (masking["sep_token"] if masking else 0),
        },
        "batch": {"global_size": 1, "micro_size": 1},
        "objective": {"name": "headless"} if headless else {"name": "vanilla", "tied": tied},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 1},
    }
    return config_from_dict(tree, source=str(model_dir / "config.json"))


def _end_token(content: Mapping[str, Any]) -> int | None:
    """The first of those that end a text."""
    named = content.get("eos_token_id")
    return (named[0] if named else None) if isinstance(named, list) else named


def _masking(model_dir: Path) -> dict[str, int]:
    """The ids of an encoder's special tokens, by their names in its tokenizer."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"`{path}` must name an encoder's special tokens, but there is no such file; put it there."
        )
    vocabulary = load_tokenizer(path)
    return {f"{name}_token": vocabulary.id_of(f"[{name.upper()}]") for name in ("mask", "cls", "sep")}


def read_settings(model_dir: Path) -> Mapping[str, Any]:
    """config.json; CheckpointError where there is none."""
    path = model_dir / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise CheckpointError(f"`{path}` must be a model's JSON settings, but cannot be read as that.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` must hold a JSON object, but holds {type(content).__name__} instead.")
    return content


def _tensors(
    model_dir: Path, files: Mapping[str, Path], theirs: Mapping[str, str], config: RunConfig
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the model, by our name. CheckpointError where the folder lacks one or its shape differs."""
    for name, shape in weight_shapes(config).items():
        if name not in theirs:
            raise CheckpointError(f"`{model_dir}` must hold the weights of {name}, but lacks them.")
        stored = theirs[name]
        with safe_open(files[stored], framework="pt") as file:
            tensor = file.get_tensor(stored).float()
        if name in (EMBEDDING, HEAD, f"{MASK_HEAD}bias") and len(tensor) == config.model.vocab_size:
            tensor = torch.cat([tensor, tensor.new_zeros(shape[0] - len(tensor), *tensor.shape[1:])])
        if tensor.shape != shape:
            raise CheckpointError(f"`{model_dir}` must hold {stored} as {list(shape)}, but has {list(tensor.shape)}.")
        yield f"weight/{name}", tensor
