"""The input embedding of any model at hand, with its tokenizer, without loading the rest."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from megahead.checkpoint import find_checkpoint
from megahead.convert.families import family_named
from megahead.convert.published import read_settings, weight_files
from megahead.convert.source import EMBEDDING, TrainedModel
from megahead.distributed import require_finite
from megahead.errors import CheckpointError


def input_embedding(path: Path) -> tuple[Tensor, Path]:
    """[V, D] fp32 and the tokenizer's file of a folder of Hugging Face, or of a run or checkpoint of ours.

    Rows of padding are left out for ours. Raises CheckpointError where there is no model or no tokenizer,
    or numbers are not finite.
    """
    if find_checkpoint(path) is None:
        files = weight_files(path)
        family = family_named(read_settings(path))
        found = next((item for item in files.items() if family.our_names(item[0]) == (EMBEDDING,)), None)
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
