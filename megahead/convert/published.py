"""A published model: a Hugging Face folder seen as parameters of ours, which are read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megahead.config import ENCODERS, ModelConfig
from megahead.convert.families import Family, family_named
from megahead.convert.source import EMBEDDING, HEAD, MASK_HEAD
from megahead.distributed import all_finite, block_ranges, joined
from megahead.errors import CheckpointError, ConfigError

_OF_NO_WEIGHT = (
    "is_causal",
    "size",
    "vocab_multiple",
    "max_positions",
    "hidden_dropout",
    "attention_dropout",
    "init",
    "init_std",
    "init_embedding_std",
)
"""Settings of a model that change nothing in what its weights compute, or (`is_causal`) what a run may learn anew."""


@dataclass(frozen=True)
class Place:
    """Where a parameter of ours is stored: in a tensor of its own, or as one of several parts along dimension 0."""

    tensor: str
    part: int
    parts: int


@dataclass(frozen=True)
class PublishedModel:
    """An open folder; no weight is loaded until asked for."""

    folder: Path
    content: Mapping[str, Any]
    """Of config.json."""

    family: Family
    files: Mapping[str, Path]
    """Which file holds each stored tensor."""

    stored: Mapping[str, Place]
    """Of each of our parameters."""

    @staticmethod
    def open(folder: Path) -> PublishedModel:
        """UserError for a folder that is no model of a kind we have, in safetensors."""
        files, content = weight_files(folder), read_settings(folder)
        family = family_named(content)
        held = {name: family.our_names(name) for name in files}
        stored = {one: Place(name, k, len(ours)) for name, ours in held.items() for k, one in enumerate(ours)}
        return PublishedModel(folder, content, family, files, stored)

    def settings(self) -> dict[str, Any]:
        """Those of a ModelConfig; FieldError for what config.json asks for and ours cannot do."""
        return self.family.settings(self.content)

    def has_head(self) -> bool:
        """Whether an output matrix, or what stands before it, is stored."""
        return any(name == HEAD or name.startswith(MASK_HEAD) for name in self.stored)

    def is_tied(self) -> bool:
        """Whether outputs are scored against the input embedding."""
        return bool(self.content.get("tie_word_embeddings", self.settings()["family"] in ENCODERS))

    def weight(self, name: str, shape: torch.Size) -> Tensor:
        """Our parameter `name` in fp32, rows of zeros where the vocabulary is padded; CheckpointError where the folder
        lacks it, has another shape, or values that are not finite."""
        return joined(self.blocks(name, shape), shape)

    def blocks(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        """The same in consecutive blocks of rows; memory holds one of them."""
        if name not in self.stored:
            raise CheckpointError(f"`{self.folder}` must hold the weights of {name}, but lacks them.")
        place = self.stored[name]
        yield from all_finite(self._stored_blocks(name, place, shape), self.files[place.tensor], place.tensor)

    def _stored_blocks(self, name: str, place: Place, shape: torch.Size) -> Iterator[Tensor]:
        with safe_open(self.files[place.tensor], framework="pt") as file:
            tensor = file.get_slice(place.tensor)
            has, wanted = list(tensor.get_shape()), [place.parts * shape[0], *shape[1:]]
            of_ids = name in (EMBEDDING, HEAD, f"{MASK_HEAD}bias") and has[0] == self.content["vocab_size"]
            if wanted != ([max(has[0], shape[0]), *has[1:]] if of_ids else has):
                raise CheckpointError(f"`{self.folder}` must hold {place.tensor} as {wanted}, but has {has}.")
            first = place.part * shape[0]
            for rows in block_ranges(shape[0]):
                block: Tensor = tensor[first + rows.start : first + rows.stop].float()  # fewer, or none, at its end
                padding = len(rows) - len(block)
                yield torch.cat([block, block.new_zeros(padding, *shape[1:])]) if padding else block

    def refuse_another_shape(self, model: ModelConfig) -> None:
        """ConfigError with all settings in which `model` would compute something else with these weights."""
        theirs, ours = _resolved(ModelConfig(**self.settings())), _resolved(model)
        differing = [f"{name}={theirs[name]}" for name in theirs if theirs[name] != ours[name]]  # as --set has it
        if differing:
            raise ConfigError("model", f"be that of {self.folder}", got="another", hint=f"set {', '.join(differing)}")


def _resolved(model: ModelConfig) -> dict[str, Any]:
    """What a model computes, with what was left out filled in."""
    given = {name: value for name, value in model.model_dump(mode="json").items() if name not in _OF_NO_WEIGHT}
    derived = {"num_key_heads": model.key_heads(), "head_dim": model.head_size(), "intermediate_size": model.mlp_size()}
    if model.has_learned_positions():  # a weight has as many rows
        derived["max_positions"] = model.max_positions
    return given | derived


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
