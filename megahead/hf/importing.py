"""Reads Hugging Face folders: as a checkpoint of megahead, or the input embedding alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from megahead.checkpoints.disk import find_checkpoint, save_untrained
from megahead.config.loading import config_from_dict
from megahead.config.masking import SPECIAL_TOKEN_FIELDS
from megahead.config.model import ENCODERS, ModelConfig
from megahead.config.run import RunConfig
from megahead.data.tokenizer import copy_tokenizer
from megahead.distributed.tensors import block_ranges, finite_blocks, join_blocks
from megahead.errors import CheckpointError, ConfigError, FieldError
from megahead.files import atomic_folder, write_atomically
from megahead.hf.decoders import DECODERS
from megahead.hf.encoders import ENCODERS as HF_ENCODERS
from megahead.hf.encoders import WITH_POSITION_OFFSET, position_offset
from megahead.hf.families import Family, filled_settings, require_key
from megahead.hf.settings import ENCODER_TOKEN_NAMES, HFSettings
from megahead.hf.trained import EMBEDDING, HEAD, MASK_HEAD, TARGET_COUNTS, TrainedModel
from megahead.objectives.pretraining import weight_shapes
from megahead.run_folder import RunFolder

FAMILIES = DECODERS | HF_ENCODERS
"""The models of Hugging Face that are imported, by `model_type`."""

_IGNORED_SETTINGS = (
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
"""Settings that do not change what the weights compute, and `is_causal`, which training may change."""


class StoredSlice(NamedTuple):
    """Where a parameter is stored: in a tensor of its own, or as one of equal parts along dimension 0."""

    tensor: str
    part: int
    num_parts: int


@dataclass(frozen=True)
class HFModel:
    """A Hugging Face folder with a model; weights are read on demand."""

    folder: Path
    hf_config: Mapping[str, Any]
    """Content of config.json."""

    family: Family
    files: Mapping[str, Path]
    """File of each stored tensor."""

    slices: Mapping[str, StoredSlice]
    """Of each parameter, by its name in megahead."""

    @staticmethod
    def open(folder: Path) -> HFModel:
        """Opens a folder in safetensors; UserError for one without a model of a supported family."""
        files, hf_config = weight_files(folder), read_hf_config(folder)
        family = find_family(hf_config)
        slices = {}
        for hf_name in files:
            names = family.parameter_names(hf_name)
            slices.update({name: StoredSlice(hf_name, part, len(names)) for part, name in enumerate(names)})
        if family.untied_bias_name in files:  # if both biases are stored, transformers adds this one
            slices[f"{MASK_HEAD}bias"] = StoredSlice(family.untied_bias_name, 0, 1)
        model = HFModel(folder, hf_config, family, files, slices)
        if HEAD in slices and model.is_tied():
            slices.setdefault(EMBEDDING, slices[HEAD])  # some writers store only one of two equal tensors
        return model

    def model_settings(self) -> dict[str, Any]:
        """Returns the settings of a ModelConfig; FieldError for a setting in config.json that is unsupported."""
        return self.family.model_settings(self.hf_config)

    def has_head(self) -> bool:
        """Whether an output matrix, or a layer before it, is stored."""
        return any(name == HEAD or name.startswith(MASK_HEAD) for name in self.slices)

    def is_tied(self) -> bool:
        """Whether outputs are scored against the input embedding. If another output matrix is stored, they are not:
        transformers then uses that matrix, whatever config.json says."""
        is_tied = self.family.is_tied_by_default or self.model_settings()["family"] in ENCODERS
        return bool(self.hf_config.get("tie_word_embeddings", is_tied)) and not self._has_another_matrix()

    def _has_another_matrix(self) -> bool:
        """Whether an output matrix is stored that differs from the input embedding."""
        if not {EMBEDDING, HEAD} <= self.slices.keys():
            return False
        names = [self.slices[name].tensor for name in (EMBEDDING, HEAD)]
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(self.files[name], framework="pt")) for name in names]
            first, second = (file.get_slice(name) for file, name in zip(files, names, strict=True))
            if first.get_shape() != second.get_shape():
                return True
            spans = (slice(rows.start, rows.stop) for rows in block_ranges(first.get_shape()[0]))
            return not all(torch.equal(first[span], second[span]) for span in spans)

    def weight(self, name: str, shape: torch.Size) -> Tensor:
        """Returns a parameter in fp32, with rows of zeros where the vocabulary is padded; CheckpointError if the folder
        lacks it, has another shape, or values that are not finite."""
        return join_blocks(self.blocks(name, shape), shape)

    def blocks(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        """Yields a parameter in consecutive blocks of rows, of which memory holds one at a time."""
        if name not in self.slices:
            raise CheckpointError(f"`{self.folder}` must hold the weights of {name}, but lacks them.")
        tensor = self.slices[name].tensor
        yield from finite_blocks(self._stored_blocks(name, shape), self.files[tensor], tensor)

    def _stored_blocks(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        hf_name, part, num_parts = self.slices[name]
        with safe_open(self.files[hf_name], framework="pt") as file:
            tensor = file.get_slice(hf_name)
            stored, expected = list(tensor.get_shape()), [num_parts * shape[0], *shape[1:]]
            is_transposed = hf_name.endswith(self.family.transposed_names)
            stored = stored[::-1] if is_transposed else stored
            is_vocabulary = name in (EMBEDDING, HEAD, f"{MASK_HEAD}bias") and stored[0] == self.hf_config["vocab_size"]
            if expected != ([max(stored[0], shape[0]), *stored[1:]] if is_vocabulary else stored):
                raise CheckpointError(f"`{self.folder}` must hold {hf_name} as {expected}, but has {stored}.")
            first = part * shape[0]
            for rows in block_ranges(shape[0]):
                span = slice(first + rows.start, first + rows.stop)  # the stored tensor ends before the padding rows
                block: Tensor = (tensor[:, span].T if is_transposed else tensor[span]).float()
                padding = len(rows) - len(block)
                yield torch.cat([block, block.new_zeros(padding, *shape[1:])]) if padding else block

    def require_same_architecture(self, model: ModelConfig) -> None:
        """Raises ConfigError with all settings by which `model` would compute something else with these weights."""
        require_same_architecture(model, ModelConfig(**self.model_settings()), self.folder)


def require_same_architecture(
    model: ModelConfig, source: ModelConfig, folder: Path, free: Collection[str] = ()
) -> None:
    """Raises ConfigError with all settings, but those that are `free` to differ, by which `model` would compute
    something else with weights of `source`, which are in `folder`."""
    stored, configured = _architecture(source), _architecture(model)
    names = [name for name in stored if name not in free and stored[name] != configured[name]]
    if names:
        changes = ", ".join(f"{name}={stored[name]}" for name in names)  # for --set
        raise ConfigError("model", f"be that of {folder}", got="another", hint=f"set {changes}")


def _architecture(model: ModelConfig) -> dict[str, Any]:
    """Returns the settings that decide what a model computes, with defaults filled in."""
    settings = {name: value for name, value in filled_settings(model).items() if name not in _IGNORED_SETTINGS}
    if model.has_learned_positions():  # the position embedding has as many rows
        settings["max_positions"] = model.max_positions
    return settings


def weight_files(model_dir: Path) -> dict[str, Path]:
    """Returns the file of each stored tensor; CheckpointError without safetensors.

    Only files that transformers reads count: model.safetensors, else those in the index, else all. Also CheckpointError
    for an adapter of PEFT, which transformers adds to the weights.
    """
    if (model_dir / "adapter_config.json").is_file():
        raise CheckpointError(
            f"`{model_dir}` must hold a model without adapters, but has PEFT's adapter_config.json; merge it first by "
            "merge_and_unload(), and save what that returns."
        )
    files = {}
    for path in _weight_paths(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                files.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"`{path}` must be a safetensors file, but cannot be read ({error}).") from None
    if not files and any(model_dir.rglob("layer_*-model_*-model_states.pt")):
        raise CheckpointError(
            f"`{model_dir}` must be a Hugging Face folder, but is a checkpoint of the GPT-NeoX library in layer files; "
            "convert it with that library's tools/ckpts/convert_neox_to_hf.py and import what it writes."
        )
    if not files:
        raise CheckpointError(
            f"`{model_dir}` must hold model weights as *.safetensors, but has none; "
            "for other formats, save it again with transformers' save_pretrained."
        )
    return files


def _weight_paths(model_dir: Path) -> list[Path]:
    index, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(model_dir.glob("*.safetensors"))
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [model_dir / name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"`{index}` must list the weights' files, but cannot be read as that.") from None


def read_hf_config(model_dir: Path) -> Mapping[str, Any]:
    """Returns the content of config.json; CheckpointError without one."""
    path = model_dir / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise CheckpointError(f"`{path}` must be a model's JSON settings, but cannot be read as that.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` must hold a JSON object, but holds {type(content).__name__} instead.")
    return content


_TEXT, _LIST, _OBJECT = (str, "a text"), (list, "a list"), (dict, "an object")
_KEY_TYPES: dict[str, tuple[type, str]] = {
    "vocab_size": (int, "a whole number"),
    **dict.fromkeys(("model_type", "hidden_act", "hidden_activation", "activation", "activation_function"), _TEXT),
    **dict.fromkeys(("architectures", "layer_types"), _LIST),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT),
}


def find_family(hf_config: Mapping[str, Any]) -> Family:
    """Returns the family of a folder; FieldError for one that is unsupported, or a key of the wrong type."""
    for name, (kind, words) in _KEY_TYPES.items():
        value = hf_config.get(name)
        require_key(value is None or isinstance(value, kind), name, f"be {words}", got=repr(value))
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise FieldError("config.json: model_type", f"be one of {', '.join(FAMILIES)}", got=model_type)
    family, is_causal = FAMILIES[model_type], hf_config.get("is_causal", True)
    can_read_it = family.head_type == "MaskedLM" or is_causal  # without it transformers 5 reads in both directions
    require_key(can_read_it, "is_causal", "be true or missing in a decoder", got=is_causal)
    return family


def max_positions(hf_config: Mapping[str, Any]) -> int | None:
    """Returns the most tokens that a model reads, or None if its config.json has no limit."""
    length = hf_config.get("max_position_embeddings", hf_config.get("n_positions"))
    if not isinstance(length, int):
        return None
    has_offset = hf_config.get("model_type") in WITH_POSITION_OFFSET
    return length - position_offset(hf_config) if has_offset else length


# Imports a folder as a checkpoint that a run can start from.


def from_hf(
    model_dir: Path,
    output_dir: Path,
    *,
    special_ids: Mapping[str, int] | None = None,
    target_counts_V: Tensor | None = None,
) -> Path:
    """Writes the weights of `model_dir` as OUTPUT/checkpoints/step-00000000, and its tokenizer and settings beside;
    returns OUTPUT.

    The checkpoint is for `init.from_checkpoint`, export and evaluation: it has no optimizer state and no dataset. The
    model is headless, tied or untied vanilla, as in the folder. The embedding is padded with zero rows to a multiple
    of 1,024. A pooler is not imported. UserError, with nothing written, for any other model, or one that is not in
    safetensors. special_ids: `mask_token`, `cls_token` and `sep_token` of an encoder whose files do not name them.
    Without special_ids and without a tokenizer, model.yaml has only the special tokens that config.json names.
    target_counts_V: how often each id was a target in a headless model's training, if known.
    """
    hf_model, hf_settings = HFModel.open(model_dir), HFSettings.from_folder(model_dir)
    tokenizer, named_ids = _find_tokenizer(model_dir), None
    if hf_model.model_settings()["family"] in ENCODERS:
        named_ids = _named_special_ids(model_dir, hf_settings, tokenizer, special_ids or {})
    config = _run_config(hf_model, hf_settings, named_ids)
    with atomic_folder(output_dir) as staged:
        run = RunFolder(staged)
        tensors = _checkpoint_tensors(hf_model, config, target_counts_V)
        unnamed = () if named_ids is None else [role for role in ENCODER_TOKEN_NAMES if role not in named_ids]
        save_initial_checkpoint(run, tensors, config, tokenizer, unnamed_tokens=unnamed)
        hf_settings.save(run)
    return output_dir


def _find_tokenizer(model_dir: Path) -> Path | None:
    files = (model_dir / name for name in ("tokenizer.json", "tokenizer.model"))
    return next((file for file in files if file.is_file()), None)


def save_initial_checkpoint(
    run: RunFolder,
    tensors: Iterable[tuple[str, Tensor]],
    config: RunConfig,
    tokenizer: Path | None,
    unnamed_tokens: Collection[str] = (),
) -> None:
    """Writes a checkpoint of step 0, the tokenizer, and model.yaml: the config's `model` and special tokens of
    `masking`, without its `unnamed_tokens`."""
    save_untrained(run.checkpoints, tensors, config.model_dump(mode="json"))
    sections: dict[str, Any] = {"model": config.model.non_default_settings()}
    if config.masking is not None:
        fields = {*SPECIAL_TOKEN_FIELDS}.difference(unnamed_tokens)
        sections["masking"] = config.masking.model_dump(mode="json", include=fields)
    write_atomically(run.model, yaml.safe_dump(sections, sort_keys=False, default_flow_style=None))
    if tokenizer is not None:
        copy_tokenizer(tokenizer, run)


def _run_config(hf_model: HFModel, hf_settings: HFSettings, named_ids: Mapping[str, int] | None) -> RunConfig:
    """Returns a run's config with the folder's model, objective and special tokens; other settings have no meaning.

    named_ids: an encoder's special tokens; unused ids stand for those that are missing.
    """
    model_dir, hf_config, model = hf_model.folder, hf_model.hf_config, hf_model.model_settings()
    names_head = hf_model.family.head_class() in (hf_config.get("architectures") or ())
    is_headless = not hf_model.has_head() and not names_head
    end_tokens = [id_ for id_ in hf_settings.end_tokens() if id_ < model["vocab_size"]]
    masking = {} if named_ids is None else _masking_settings(model, named_ids, end_tokens)
    others = {masking.get("mask_token"), masking.get("cls_token")}
    settings = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", model_dir.resolve().name) or "imported",
        "model": model,
        "masking": masking or None,
        "data": {
            "train": "(weights imported, no text)",
            "sequence_length": model.get("max_positions", 2048),
            "end_token": next((id_ for id_ in end_tokens if id_ not in others), masking.get("sep_token", 0)),
        },
        "batch": {"global_size": 1, "micro_size": 1},
        "objective": {"name": "headless"} if is_headless else {"name": "vanilla", "tied": hf_model.is_tied()},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 1},
    }
    return config_from_dict(settings, source=str(model_dir / "config.json"))


def _masking_settings(
    model: Mapping[str, Any], named_ids: Mapping[str, int], end_tokens: Collection[int]
) -> dict[str, Any]:
    """Returns a MaskingConfig's special tokens; an unused id stands for one that is not named."""
    padding = [model["position_offset"] - 1] if "position_offset" in model else []
    used_ids = {*named_ids.values(), *end_tokens, *padding}
    unused_ids = (id_ for id_ in reversed(range(model["vocab_size"])) if id_ not in used_ids)
    ids = {role: named_ids[role] if role in named_ids else next(unused_ids) for role in ENCODER_TOKEN_NAMES}
    return {**ids, "special_tokens": padding}


def _named_special_ids(
    model_dir: Path, hf_settings: HFSettings, tokenizer: Path | None, special_ids: Mapping[str, int]
) -> dict[str, int]:
    """Returns the ids of an encoder's special tokens; CheckpointError if the files of a folder with a tokenizer do not
    name one of them."""
    ids = {**hf_settings.special_ids(tokenizer), **special_ids}
    missing = [role for role in ENCODER_TOKEN_NAMES if ids[role] is None]
    if missing and tokenizer is not None:
        raise CheckpointError(
            f"`{model_dir}` must name an encoder's {missing[0]} in tokenizer_config.json, special_tokens_map.json or "
            "config.json, but does not; give --special-ids MASK CLS SEP."
        )
    return {role: id_ for role, id_ in ids.items() if id_ is not None}


def _checkpoint_tensors(hf_model: HFModel, config: RunConfig, counts_V: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the model, and the target counts. CheckpointError if the folder lacks a parameter or
    its shape differs."""
    for name, shape in weight_shapes(config).items():
        yield f"weight/{name}", hf_model.weight(name, shape)
    if counts_V is not None:
        yield TARGET_COUNTS, functional.pad(counts_V, (0, config.model.padded_vocab_size() - len(counts_V)))


def load_input_embedding(path: Path) -> tuple[Tensor, Path]:
    """Returns the fp32 input embedding [V, D] and the tokenizer's file of a Hugging Face folder, run or checkpoint.

    A run's padding rows are not included. Raises CheckpointError without a model or a tokenizer, or if values are not
    finite.
    """
    if find_checkpoint(path) is None:
        hf_model = HFModel.open(path)
        settings = hf_model.model_settings()
        weight_VD = hf_model.weight(EMBEDDING, torch.Size((settings["vocab_size"], settings["hidden_size"])))
        tokenizer = _find_tokenizer(path)
    else:
        model = TrainedModel.open(path)
        weight_VD = model.weight(EMBEDDING)[: model.config.model.vocab_size]
        tokenizer = model.tokenizer_path()
    return weight_VD, require_tokenizer(tokenizer, path)


def require_tokenizer(file: Path | None, folder: Path) -> Path:
    """Returns the tokenizer's file of `folder`; CheckpointError without one."""
    if file is None or not file.is_file():
        raise CheckpointError(f"`{folder}` must hold a tokenizer.json, but has none; put the model's tokenizer there.")
    return file
