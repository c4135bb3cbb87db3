"""Writes vectors of items and of sequences, whose products rank items as the model does, for nearest-neighbour indexes.

U sequences, N items, D features.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from megahead.checkpoints.disk import find_checkpoint
from megahead.data.indexed import Array
from megahead.data.item_sequences import END_ID, ItemVocabulary, items_path
from megahead.errors import CheckpointError, FieldError
from megahead.evaluate.next_item import ItemModel
from megahead.files import atomic_folder
from megahead.hf.export import ensure_hf_folder
from megahead.hf.trained import TrainedModel

VECTORS_FILE = "vectors.safetensors"
_COMPARED_SEQUENCES = 16
_LARGEST_ERROR = 1e-4


@dataclass(frozen=True)
class VectorsReport:
    """Facts about written vectors."""

    num_items: int
    num_sequences: int
    size: int
    """Features of a vector: D, and one for the items' biases if the head has them."""

    largest_error: float
    """Of the products, beside the model's own scores, relative to the largest score."""


def write_vectors(
    model: Path, output: Path, sequences: Sequence[Array], vocabulary: ItemVocabulary | None = None
) -> VectorsReport:
    """Writes the vectors of all items and the context vectors of `sequences` (ids without the end id, [length] each).

    `output` gets `vectors.safetensors` with `items` [N, D] and `contexts` [U, D] in float32, both also as .npy, and
    `keys.json`, the keys of the items in the order of their vectors. The product of a context and an item is the score
    of that item as the next one; if the head has biases they are one more feature, which is 1 in contexts.
    vocabulary: None takes `items.json` beside the run's training data. Raises CheckpointError if products differ from
    the model's scores. Memory: all vectors twice.
    """
    vocabulary = vocabulary or _find_vocabulary(model)
    items = ItemModel(ensure_hf_folder(model))
    items.require_ids(len(vocabulary))
    vectors_ND, bias_N = items.vectors.vectors_ND[: len(vocabulary)], items.vectors.bias_N
    contexts_UD = torch.cat(
        [torch.empty(0, vectors_ND.shape[1]), *(part.cpu() for part in items.all_contexts(sequences))]
    )
    vectors_ND = vectors_ND.cpu()
    if bias_N is not None:
        vectors_ND = torch.cat([vectors_ND, bias_N[: len(vocabulary), None].cpu()], 1)
        contexts_UD = torch.cat([contexts_UD, torch.ones(len(contexts_UD), 1)], 1)
    error = _largest_error(items, sequences[:_COMPARED_SEQUENCES], contexts_UD, vectors_ND)
    tensors = {"items": vectors_ND[END_ID + 1 :].contiguous(), "contexts": contexts_UD.contiguous()}
    with atomic_folder(output, replaceable=VECTORS_FILE) as folder:
        save_file(tensors, folder / VECTORS_FILE)
        for name, tensor in tensors.items():
            np.save(folder / f"{name}.npy", tensor.numpy())
        (folder / "keys.json").write_text(json.dumps(vocabulary.keys.to_pylist()), encoding="utf-8")
    return VectorsReport(len(vocabulary) - 1, len(contexts_UD), vectors_ND.shape[1], error)


def _find_vocabulary(model: Path) -> ItemVocabulary:
    """The vocabulary beside the training data of a run; FieldError without one."""
    if find_checkpoint(model) is not None:
        paths = [items_path(part.prefix) for part in TrainedModel.open(model).config.data.parts()]
        if existing := [path for path in paths if path.is_file()]:
            return ItemVocabulary.load(existing[0])
    hint = "it lies beside the training data"
    raise FieldError("--items", f"name the items.json of `{model}`", got="missing", hint=hint)


def _largest_error(items: ItemModel, sequences: Sequence[Array], contexts_UD: Tensor, vectors_ND: Tensor) -> float:
    """Compares products with the model's own scores; CheckpointError if they differ."""
    if not sequences:
        return 0.0
    scores_UN = contexts_UD[: len(sequences)] @ vectors_ND.T
    expected_UN = torch.stack([items.logits(ids)[: len(vectors_ND)] for ids in sequences]).cpu()
    error = ((scores_UN - expected_UN).abs().max() / expected_UN.abs().max().clamp(min=1)).item()
    if not error <= _LARGEST_ERROR:
        raise CheckpointError(
            f"products of vectors must be the model's scores within {_LARGEST_ERROR}, but differ by {error:.1e}; its "
            "head is no plain product."
        )
    return error
