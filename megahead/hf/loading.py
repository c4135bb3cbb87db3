"""Loads Hugging Face folders as models of transformers: quietly, in one dtype; missing weights are errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
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

from megahead.distributed.tensors import require_finite
from megahead.errors import CheckpointError
from megahead.files import read_json_object
from megahead.hf.decoders import DECODERS, LLAMA
from megahead.hf.encoders import ENCODERS, WITH_POOLER, WITH_POSITION_OFFSET, position_offset
from megahead.hf.importing import max_positions, require_tokenizer
from megahead.hf.settings import PADDING_TOKENS, HFSettings


def load_causal(folder: Path, dtype: torch.dtype = torch.float32, *, offload_folder: Path | None = None) -> Any:
    """Returns the causal language model in `folder`, in evaluation mode; CheckpointError unless the folder has exactly
    its weights.

    A folder without a head is refused: transformers would fill in a random one. offload_folder: read each layer's
    weights from disk whenever it is called, from a copy in this folder if their dtype differs; a ModernBERT is loaded
    whole.
    """
    return _load(AutoModelForCausalLM, folder, dtype, _offload_options(folder, offload_folder, head=True))


def load_backbone(folder: str | Path, dtype: torch.dtype = torch.float32, *, offload_folder: Path | None = None) -> Any:
    """Returns the backbone in `folder`, in evaluation mode; CheckpointError unless the folder has exactly its weights.

    offload_folder: as for `load_causal`; an encoder is loaded whole.
    """
    folder = Path(folder)
    options = _pooler_options(folder) | _offload_options(folder, offload_folder, head=False)
    return _load(AutoModel, folder, dtype, options)


def is_encoder(folder: Path) -> bool:
    """Whether config.json in `folder` names a model that predicts masked tokens."""
    hf_config = read_json_object(folder / "config.json")
    is_masked_lm = any(name.endswith("ForMaskedLM") for name in hf_config.get("architectures") or ())
    family = ENCODERS.get(hf_config.get("model_type", ""))
    return is_masked_lm or (family is not None and family.head_type == "MaskedLM")


def load_masked(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Returns the encoder in `folder` with its masked-language-model head, in evaluation mode; CheckpointError unless
    the folder has exactly its weights."""
    return _load(AutoModelForMaskedLM, folder, dtype, {})


def load_embedding_model(folder: Path, *, random_weights: bool = False) -> Any:
    """Returns the base model in `folder` in fp32, in evaluation mode, without its head or pooler, if it has
    one; random_weights: only the config is read. CheckpointError if weights are missing."""
    options = _pooler_options(folder)
    if random_weights:
        with _read_by_transformers(folder):
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
            return AutoModel.from_config(config, dtype=torch.float32, **options).eval()
    model, report = _load_with_report(AutoModel, folder, torch.float32, options)
    _require_keys(folder, model, report)
    return model.eval()


def load_classifier(folder: Path, num_outputs: int, padding_id: int, *, random_weights: bool = False) -> Any:
    """Returns the model in `folder` in fp32 with a head of `num_outputs` values a sequence: a new one, drawn by torch's
    seed, unless a classifier of as many outputs is stored.

    Any architecture that transformers classifies sequences with; a pooler that was never pretrained is new as well.
    random_weights: only the config is read from the folder. CheckpointError if weights of the backbone are missing.
    """
    options = {"num_labels": num_outputs, "pad_token_id": padding_id}
    if random_weights:
        with _read_by_transformers(folder):
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, **options)
            return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model, report = _load_with_report(AutoModelForSequenceClassification, folder, torch.float32, options)
    _require_keys(folder, model, report, prefix=f"{model.base_model_prefix}.", ignored_part=".pooler.")
    return model


def _require_keys(
    folder: Path, model: Any, report: Mapping[str, Any], *, prefix: str = "", ignored_part: str | None = None
) -> None:
    """Raises CheckpointError if a weight is missing, or has another shape, whose name begins with `prefix` and does not
    contain `ignored_part`."""
    keys = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    needed = sorted(
        name for name in keys if name.startswith(prefix) and (ignored_part is None or ignored_part not in name)
    )
    if needed:
        raise CheckpointError(f"`{folder}` must hold the weights of a {type(model).__name__}, but lacks {needed[0]}.")


def read_context_length(folder: Path) -> int | None:
    """Returns the most tokens that the model in `folder` reads, or None if its config.json has no limit."""
    return max_positions(read_json_object(folder / "config.json"))


class WordStreamer(TextStreamer):
    """Passes generated text to a callback, word by word; a `streamer` of transformers' `generate`."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)


def context_length(model: Any) -> int:
    """Returns the most tokens that a model reads; 2,048 if its config has no limit (Bloom, Mamba)."""
    model_type = getattr(model.config, "model_type", None)  # a class attribute, which `vars` lacks
    return max_positions({**vars(model.config), "model_type": model_type}) or 2048


def logits_at(model: Any, row_O: Tensor, position_O: Tensor, max_outputs: int, **inputs: Any) -> Iterator[Tensor]:
    """Yields the logits [o, V] of a language model at these positions, for at most `max_outputs` of them at once."""
    outputs = model.base_model(**inputs)
    for hidden_oD in outputs.last_hidden_state[row_O, position_O].split(max_outputs):
        outputs.last_hidden_state = hidden_oD[None]
        with patch.object(model.base_model, "forward", lambda *_, **__: outputs):  # leaves the head
            yield model(**inputs).logits[0]


def load_tokenizer_folder(folder: Path) -> Any:
    """Returns the tokenizer in `folder`, without BPE dropout. It has a padding token, unless the folder has neither one
    nor an end token. An encoder's has the special tokens that the folder's other files name. CheckpointError without a
    tokenizer.json."""
    file = require_tokenizer(folder / "tokenizer.json", folder)
    with _read_by_transformers(folder):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    if is_encoder(folder):
        ids = HFSettings.from_folder(folder).special_ids(file)
        for role in (role for role, id_ in ids.items() if id_ is not None and getattr(tokenizer, role) is None):
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(ids[role]))
    tokenizer.pad_token = _padding_token(tokenizer, read_json_object(folder / "config.json"))
    if getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        tokenizer.backend_tokenizer.model.dropout = None
    return tokenizer


def _padding_token(tokenizer: Any, hf_config: Mapping[str, Any]) -> str | None:
    """Returns the padding token: in a RoBERTa the id before its position offset; else the one that the tokenizer names,
    or a token spelled like one ([PAD], <pad>); else the end token. No text contains it, so a classifier finds the last
    token before the padding."""
    if hf_config.get("model_type") in WITH_POSITION_OFFSET:
        token: str | None = tokenizer.convert_ids_to_tokens(position_offset(hf_config) - 1)
        return token
    vocabulary = tokenizer.get_vocab()
    spelled = next((token for token in PADDING_TOKENS if token in vocabulary), None)
    return tokenizer.pad_token or spelled or tokenizer.eos_token


def _pooler_options(folder: Path) -> dict[str, Any]:
    has_pooler = read_json_object(folder / "config.json").get("model_type") in WITH_POOLER
    return {"add_pooling_layer": False} if has_pooler else {}


def _offload_options(folder: Path, offload_folder: Path | None, *, head: bool) -> dict[str, Any]:
    """Returns transformers' options that leave a decoder's weights on disk; none for a model that is loaded whole."""
    model_type = read_json_object(folder / "config.json").get("model_type")
    if offload_folder is None or model_type in ENCODERS:
        return {}
    family = DECODERS.get(model_type or "", LLAMA)
    prefix, devices = (family.base_model_prefix, {"lm_head": "disk"}) if head else ("", {})
    devices |= {f"{prefix}{name}": "disk" for name in family.disk_offloaded_modules}
    devices |= {f"{prefix}{name}": "cpu" for name in family.cpu_modules}
    return {"device_map": devices, "offload_folder": str(offload_folder)}


def _load(auto_class: Any, folder: Path, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    """Returns a model in evaluation mode; CheckpointError unless the folder has exactly its weights."""
    model, report = _load_with_report(auto_class, folder, dtype, options)
    if "lm_head.weight" in report["missing_keys"]:
        raise CheckpointError(
            f"`{folder}` must hold a head (missing keys: lm_head.weight), but is a backbone alone; export its "
            "checkpoint with --head pmi, or name the run itself."
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(problem):
            keys = f"{problem.replace('_', ' ')}: {sorted(map(str, report[problem]))[0]}"
            raise CheckpointError(f"`{folder}` must hold the weights of a {type(model).__name__}, but has {keys}.")
    return model.eval()


def _load_with_report(
    auto_class: Any, folder: Path, dtype: torch.dtype, options: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    with _read_by_transformers(folder):
        model, report = auto_class.from_pretrained(
            str(folder),
            dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # the report has them
            **options,
        )
    require_finite(model.named_parameters(), folder)
    return model, report


@contextmanager
def _read_by_transformers(folder: Path) -> Iterator[None]:
    """In the block, transformers is silent, and every error becomes a CheckpointError: libraries raise errors of all
    types for a file that is cut short or of another kind."""
    try:
        with _quiet():
            yield
    except Exception as error:
        text = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        reason = " ".join(text.split()).partition(" Model type should be one of ")[0]  # some hundred names
        raise CheckpointError(f"`{folder}` must be a Hugging Face model folder, but cannot be read: {reason}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' reports and progress bars; the checks of this module replace them."""
    verbosity, has_progress_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    offload_logger = getLogger("accelerate.big_modeling")
    level = offload_logger.level
    offload_logger.setLevel("ERROR")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        offload_logger.setLevel(level)
        if has_progress_bars:
            logging.enable_progress_bar()
