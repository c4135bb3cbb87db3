"""A published model, read as parameters of ours: imported as a checkpoint, loaded strictly, or its embedding alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TextStreamer,
)
from transformers.utils import logging

from megahead.checkpoints.disk import find_checkpoint, save_untrained
from megahead.config.loading import config_from_dict
from megahead.config.masking import SPECIAL_TOKEN_FIELDS
from megahead.config.model import ENCODERS, ModelConfig
from megahead.config.run import RunConfig
from megahead.data.tokenizer import copy_tokenizer
from megahead.distributed.tensors import block_ranges, finite_blocks, join_blocks, require_finite
from megahead.errors import CheckpointError, ConfigError, FieldError
from megahead.files import atomic_folder, write_atomically
from megahead.hf import decoders, encoders
from megahead.hf.families import Family
from megahead.hf.settings import KeptSettings
from megahead.hf.trained import EMBEDDING, HEAD, MASK_HEAD, TARGET_COUNTS, TrainedModel
from megahead.objectives.pretraining import weight_shapes
from megahead.run_folder import RunFolder

_WITHOUT_EFFECT = [
    "is_causal",
    "size",
    "vocab_multiple",
    "max_positions",
    "hidden_dropout",
    "attention_dropout",
    "init",
]
_WITHOUT_EFFECT += ["init_std", "init_embedding_std"]
"""Settings of a model that change nothing in what its weights compute, or (`is_causal`) what a run may learn anew."""


class StoredSlice(NamedTuple):
    """Where a parameter of ours is stored: in a tensor of its own, or as one of several parts along dimension 0."""

    tensor: str
    part: int
    parts: int


@dataclass(frozen=True)
class PublishedModel:
    """An open folder; no weight is loaded before it is used."""

    folder: Path
    content: Mapping[str, Any]
    """Of config.json."""

    family: Family
    files: Mapping[str, Path]
    """Which file holds each stored tensor."""

    stored: Mapping[str, StoredSlice]
    """Of each of our parameters."""

    @staticmethod
    def open(folder: Path) -> PublishedModel:
        """UserError for a folder that is no model of a kind we have, in safetensors."""
        files, content = weight_files(folder), read_settings(folder)
        family = family_named(content)
        parts = {name: family.ours(name) for name in files}
        stored = {one: StoredSlice(name, k, len(ours)) for name, ours in parts.items() for k, one in enumerate(ours)}
        return PublishedModel(folder, content, family, files, stored)

    def settings(self) -> dict[str, Any]:
        """Those of a ModelConfig; FieldError for what config.json has and ours cannot do."""
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
        return join_blocks(self.blocks(name, shape), shape)

    def blocks(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        """The same in consecutive blocks of rows; memory holds one of them."""
        if name not in self.stored:
            raise CheckpointError(f"`{self.folder}` must hold the weights of {name}, but lacks them.")
        tensor = self.stored[name].tensor
        yield from finite_blocks(self._stored_blocks(name, shape), self.files[tensor], tensor)

    def _stored_blocks(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        place = self.stored[name]
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
    given = {name: value for name, value in model.model_dump(mode="json").items() if name not in _WITHOUT_EFFECT}
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


FAMILIES = decoders.FAMILIES | encoders.FAMILIES
"""Of folders that are imported, by the `model_type` in config.json."""


def family_named(content: Mapping[str, Any]) -> Family:
    """The kind of a folder, by its config.json; FieldError for one we do not have."""
    kind = content.get("model_type")
    if kind not in FAMILIES:
        raise FieldError("config.json: model_type", f"be one of {', '.join(FAMILIES)}", got=kind)
    return FAMILIES[kind]


# A folder as a checkpoint of ours, from which a run can start.


def from_hf(
    model_dir: Path,
    output_dir: Path,
    *,
    special_ids: Mapping[str, int] | None = None,
    target_counts_V: Tensor | None = None,
) -> Path:
    """Writes the weights of `model_dir` as OUTPUT/checkpoints/step-00000000, and its tokenizer beside; returns OUTPUT.
    Its settings are kept, for exports.

    Good for `init.from_checkpoint`, for export and for evaluation: it holds no optimizer state and no text. The
    model is headless, tied or untied vanilla, as the folder is. The table is padded with zero rows to a multiple
    of 1,024. A pooler is left out. Raises a UserError for a folder that is none of these in safetensors, leaving
    nothing behind. special_ids: `mask_token`, `cls_token` and `sep_token` of an encoder whose files do not name them.
    target_counts_V: of the targets that a headless model was trained on, where they are known.
    """
    published = PublishedModel.open(model_dir)
    kept = KeptSettings.of_folder(model_dir)
    files = (model_dir / name for name in ("tokenizer.json", "tokenizer.model"))
    tokenizer = next((file for file in files if file.is_file()), None)
    config = _config(published, kept, tokenizer, special_ids or {})
    with atomic_folder(output_dir) as staged:
        run = RunFolder(staged)
        tensors = _tensors(published, config, target_counts_V)
        save_initial_checkpoint(run, tensors, config, tokenizer)
        kept.keep(run)
    return output_dir


def save_initial_checkpoint(
    run: RunFolder, tensors: Iterable[tuple[str, Tensor]], config: RunConfig, tokenizer: Path | None
) -> None:
    """Writes what a run can start from: a checkpoint of step 0, the tokenizer, and the sections of the next config that
    say which model it is."""
    save_untrained(run.checkpoints, tensors, config.model_dump(mode="json"))
    sections: dict[str, Any] = {"model": config.model.non_default_settings()}
    if config.masking is not None:
        sections["masking"] = config.masking.model_dump(mode="json", include={*SPECIAL_TOKEN_FIELDS})
    write_atomically(run.model, yaml.safe_dump(sections, sort_keys=False, default_flow_style=None))
    if tokenizer is not None:
        copy_tokenizer(tokenizer, run)


def _config(
    published: PublishedModel, kept: KeptSettings, tokenizer: Path | None, special_ids: Mapping[str, int]
) -> RunConfig:
    """A run's config around the folder's model; only model, objective and special tokens mean something."""
    model_dir, content = published.folder, published.content
    headless = not published.has_head() and published.family.with_head() not in (content.get("architectures") or [])
    settings, masking = published.settings(), None
    if settings["family"] in ENCODERS:
        masking = _masking(model_dir, {**kept.special_ids(tokenizer), **special_ids})
    ends = [*kept.end_tokens(), masking["sep_token"] if masking else 0]
    tree = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", model_dir.resolve().name) or "imported",
        "model": settings,
        "masking": masking,
        "data": {
            "train": "(weights imported, no text)",
            "sequence_length": content.get("max_position_embeddings", 2048),
            "end_token": ends[0],
        },
        "batch": {"global_size": 1, "micro_size": 1},
        "objective": {"name": "headless"} if headless else {"name": "vanilla", "tied": published.is_tied()},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 1},
    }
    return config_from_dict(tree, source=str(model_dir / "config.json"))


def _masking(model_dir: Path, ids: Mapping[str, int | None]) -> dict[str, int]:
    """The ids of an encoder's special tokens; CheckpointError unless all are known."""
    known = {role: id_ for role, id_ in ids.items() if id_ is not None}
    unknown = [role for role in ids if role not in known]
    if unknown:
        raise CheckpointError(
            f"`{model_dir}` must name an encoder's {unknown[0]} in tokenizer_config.json, tokenizer.json (as "
            f"[{unknown[0][:-6].upper()}]) or config.json, but does not; give --special-ids MASK CLS SEP."
        )
    return known


def _tensors(published: PublishedModel, config: RunConfig, counts_V: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the model, by our name, and the counts. CheckpointError where the folder lacks a parameter or
    its shape differs."""
    for name, shape in weight_shapes(config).items():
        yield f"weight/{name}", published.weight(name, shape)
    if counts_V is not None:
        yield TARGET_COUNTS, functional.pad(counts_V, (0, config.model.padded_vocab_size() - len(counts_V)))


# Folders as models of transformers: loaded quietly, in a stated dtype, and never with a random head.

_NEOX = {"embed_in": "disk", "layers": "disk", "final_layer_norm": "cpu", "rotary_emb": "cpu", "emb_dropout": "cpu"}
_LLAMA = {"embed_tokens": "disk", "layers": "disk", "norm": "cpu", "rotary_emb": "cpu"}
"""Where the parts of a body stay that is not loaded whole."""


def load_causal(folder: Path, dtype: torch.dtype = torch.float32, *, offload_folder: Path | None = None) -> Any:
    """The language model in `folder`, ready to score; CheckpointError when its weights are not exactly its own.

    A folder without a head is refused: transformers would fill in a random one. offload_folder: read each layer's
    weights from disk whenever it is called, those of another dtype from a copy there; a ModernBERT is loaded whole.
    """
    return _load(AutoModelForCausalLM, folder, dtype, _offload(folder, offload_folder, head=True))


def load_backbone(folder: str | Path, dtype: torch.dtype = torch.float32, *, offload_folder: Path | None = None) -> Any:
    """The headless model in `folder`; CheckpointError when its weights are not exactly its own.

    offload_folder: as for `load_causal`; an encoder is loaded whole.
    """
    folder = Path(folder)
    without_pooler = {"add_pooling_layer": False} if _settings(folder).get("model_type") == "bert" else {}
    return _load(AutoModel, folder, dtype, without_pooler | _offload(folder, offload_folder, head=False))


def is_encoder(folder: Path) -> bool:
    """Whether config.json in `folder` names a model that predicts masked tokens; False where it names none."""
    settings = _settings(folder)
    masked = any(name.endswith("ForMaskedLM") for name in settings.get("architectures") or ())
    return masked or settings.get("model_type") in ("bert", "distilbert", "modernbert")


def load_masked(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The encoder in `folder` with its masked-language-model head; CheckpointError when either is not its own."""
    return _load(AutoModelForMaskedLM, folder, dtype, {})


def load_classifier(folder: Path, outputs: int, padding_id: int, *, random_weights: bool = False) -> Any:
    """The model in `folder` in fp32 under a new, random head of `outputs` numbers a sequence, drawn by torch's seed.

    Any architecture that transformers classifies sequences with; a pooler that was never pretrained is new as well.
    random_weights: only the shape comes from the folder. CheckpointError when the body's weights are not all there.
    """
    settings = {"num_labels": outputs, "pad_token_id": padding_id}
    if random_weights:
        try:
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, **settings)
            return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise _unreadable(folder, error) from None
    model, report = _open(AutoModelForSequenceClassification, folder, torch.float32, settings)
    body = f"{model.base_model_prefix}."
    missing = sorted(name for name in report["missing_keys"] if name.startswith(body) and ".pooler." not in name)
    if missing:
        raise CheckpointError(f"`{folder}` must hold the weights of a {type(model).__name__}, but lacks {missing[0]}.")
    return model


def context_length(folder: Path) -> int | None:
    """Tokens that the model in `folder` reads at most, where its config.json says so."""
    length = _settings(folder).get("max_position_embeddings")
    return length if isinstance(length, int) else None


class WordStreamer(TextStreamer):
    """Hands what transformers' `generate` writes on, word by word, instead of printing it."""

    def __init__(self, tokenizer: Any, receive: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._receive = receive

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._receive(text)


def context_of(model: Any) -> int:
    """Tokens that an opened model reads at most; 2,048 where its config sets no limit (Bloom, Mamba)."""
    return int(getattr(model.config, "max_position_embeddings", None) or 2048)


def load_tokenizer_folder(folder: Path) -> Any:
    """The tokenizer in `folder`, without dropout, an encoder's with the special tokens that other files there name;
    CheckpointError when there is none."""
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"`{folder}` must hold a tokenizer.json, but has none; put the model's tokenizer there.")
    with _quiet():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    if is_encoder(folder):
        ids = KeptSettings.of_folder(folder).special_ids(folder / "tokenizer.json")
        for role in (role for role, id_ in ids.items() if id_ is not None and getattr(tokenizer, role) is None):
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(ids[role]))
    if getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        tokenizer.backend_tokenizer.model.dropout = None
    return tokenizer


def _settings(folder: Path) -> Mapping[str, Any]:
    """The content of config.json; empty where there is none (loading then raises)."""
    try:
        return read_settings(folder)
    except CheckpointError:
        return {}


def _offload(folder: Path, offload_folder: Path | None, *, head: bool) -> dict[str, Any]:
    """transformers' options to leave a decoder's weights on disk; none for what is loaded whole."""
    kind = _settings(folder).get("model_type")
    if offload_folder is None or kind in encoders.FAMILIES:
        return {}
    prefix, places = ("gpt_neox", _NEOX) if kind == "gpt_neox" else ("model", _LLAMA)
    if head:
        places = {"lm_head": "disk", **{f"{prefix}.{part}": place for part, place in places.items()}}
    return {"device_map": dict(places), "offload_folder": str(offload_folder)}


def _load(kind: Any, folder: Path, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    """A model with all its weights and no others."""
    model, report = _open(kind, folder, dtype, options)
    if "lm_head.weight" in report["missing_keys"]:
        raise CheckpointError(
            f"`{folder}` must hold a head (missing keys: lm_head.weight), but is a backbone alone; export its "
            "checkpoint with --head pmi, or name the run itself."
        )
    for flaw in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(flaw):
            found = f"{flaw.replace('_', ' ')}: {sorted(map(str, report[flaw]))[0]}"
            raise CheckpointError(f"`{folder}` must hold the weights of a {type(model).__name__}, but has {found}.")
    return model.eval()


def _open(kind: Any, folder: Path, dtype: torch.dtype, options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The model, and transformers' report on its weights."""
    try:
        with _quiet():
            model, report = kind.from_pretrained(
                str(folder), dtype=dtype, output_loading_info=True, local_files_only=True, **options
            )
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from None
    require_finite(model.named_parameters(), folder)
    return model, report


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    return CheckpointError(f"`{folder}` must be a Hugging Face model folder, but cannot be read: {reason}")


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its reports and bars, which are replaced by what we check ourselves."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    offloading = getLogger("accelerate.big_modeling")
    level = offloading.level
    offloading.setLevel("ERROR")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        offloading.setLevel(level)
        if bars:
            logging.enable_progress_bar()


def input_embedding(path: Path) -> tuple[Tensor, Path]:
    """[V, D] fp32 and the tokenizer's file of a folder of Hugging Face, or of a run or checkpoint of ours.

    Rows of padding are left out for ours. Raises CheckpointError where there is no model or no tokenizer,
    or numbers are not finite.
    """
    if find_checkpoint(path) is None:
        files = weight_files(path)
        family = family_named(read_settings(path))
        found = next((item for item in files.items() if family.ours(item[0]) == (EMBEDDING,)), None)
        if found is None:
            raise CheckpointError(f"`{path}` must hold an input embedding, but does not.")
        with safe_open(found[1], framework="pt") as file:
            weight_VD: Tensor = file.get_tensor(found[0]).float()
        require_finite([(found[0], weight_VD)], found[1])
        tokenizer: Path | None = path / "tokenizer.json"
    else:
        model = TrainedModel.open(path)
        weight_VD = model.weight(EMBEDDING)[: model.config.model.vocab_size]
        tokenizer = model.tokenizer()
    if tokenizer is None or not tokenizer.is_file():
        raise CheckpointError(f"`{path}` must hold a tokenizer.json, but has none; put the model's tokenizer there.")
    return weight_VD, tokenizer
