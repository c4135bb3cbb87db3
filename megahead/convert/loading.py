"""Loads Hugging Face folders the strict way: quietly, in a stated dtype, and never with a random head."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertModel,
    DistilBertModel,
    GPTNeoXModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from megahead.convert.kept_settings import KeptSettings
from megahead.distributed import require_finite
from megahead.errors import CheckpointError

_NEOX = {"embed_in": "disk", "layers": "disk", "final_layer_norm": "cpu", "rotary_emb": "cpu", "emb_dropout": "cpu"}
_LLAMA = {"embed_tokens": "disk", "layers": "disk", "norm": "cpu", "rotary_emb": "cpu"}


def load_causal(folder: Path, dtype: torch.dtype = torch.float32, *, stream_to: Path | None = None) -> Any:
    """The language model in `folder`, ready to score; CheckpointError when its weights are not exactly its own.

    A folder without a head is refused: transformers would fill in a random one. stream_to: read each layer's weights
    from disk whenever it is called, those of another dtype from a copy in this folder; a ModernBERT is loaded whole.
    """
    kind = _settings(folder).get("model_type")
    if kind == "modernbert-decoder":
        return _load(AutoModelForCausalLM, folder, dtype, {})
    prefix, places = ("gpt_neox", _NEOX) if kind == "gpt_neox" else ("model", _LLAMA)
    whole = {"lm_head": "disk", **{f"{prefix}.{part}": place for part, place in places.items()}}
    return _load(AutoModelForCausalLM, folder, dtype, _offload(whole, stream_to))


def load_backbone(folder: str | Path, dtype: torch.dtype = torch.float32, *, stream_to: Path | None = None) -> Any:
    """The headless model in `folder`; CheckpointError when its weights are not exactly its own.

    stream_to: as for `load_causal`; an encoder is loaded whole.
    """
    folder = Path(folder)
    kind = _settings(folder).get("model_type")
    if kind == "bert":
        return _load(BertModel, folder, dtype, {"add_pooling_layer": False})
    if kind == "distilbert":
        return _load(DistilBertModel, folder, dtype, {})
    if kind in ("modernbert", "modernbert-decoder"):
        return _load(AutoModel, folder, dtype, {})
    if kind in ("llama", "qwen2", "qwen3", "mistral"):
        return _load(AutoModel, folder, dtype, _offload(_LLAMA, stream_to))
    return _load(GPTNeoXModel, folder, dtype, _offload(_NEOX, stream_to))


def is_encoder(folder: Path) -> bool:
    """Whether the model in `folder` says that it is one that guesses masked tokens; False where nothing is said."""
    settings = _settings(folder)
    named = settings.get("architectures") or ()
    kinds = ("bert", "distilbert", "modernbert")
    return settings.get("model_type") in kinds or any(name.endswith("ForMaskedLM") for name in named)


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
    """The content of config.json; nothing where there is none (loading then raises)."""
    try:
        content: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _offload(places: Mapping[str, str], stream_to: Path | None) -> dict[str, Any]:
    """transformers' options to leave weights on disk."""
    return {} if stream_to is None else {"device_map": dict(places), "offload_folder": str(stream_to)}


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
            name = sorted(map(str, report[flaw]))[0]
            kind_name, flaw_name = type(model).__name__, flaw.replace("_", " ")
            raise CheckpointError(f"`{folder}` must hold the weights of a {kind_name}, but has {flaw_name}: {name}.")
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
