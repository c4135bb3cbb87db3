"""The tensors of an export under their Hugging Face names, made piece by piece when they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megahead.convert.export_heads import Head
from megahead.convert.export_target import ExportTarget
from megahead.convert.families import Family
from megahead.convert.source import BACKBONE, EMBEDDING, HEAD, TrainedModel
from megahead.convert.stream import Streamed

_NORM_BIAS = "backbone.final_norm.bias"
_VOCABULARY_BIAS = "mask_head.bias"
_PIECE_ROWS = 4096


def exported_tensors(target: ExportTarget) -> Iterator[Streamed]:
    """Every tensor of the export, the head's last."""
    model, head, family, vocab_size = target.model, target.head, target.family, target.vocab_size
    body = [name for name in model.shapes if name.startswith(BACKBONE)]  # the head's come last, the temperature in them
    for theirs in dict.fromkeys(_hf_name(family, name) for name in body):
        names = family.our_names(theirs)
        rows, *columns = model.shapes[names[0]]
        size = (vocab_size if names == (EMBEDDING,) else rows * len(names), *columns)
        exported = theirs.removeprefix(family.prefix) if head.matrix is None else theirs
        yield Streamed(exported, size, partial(_backbone_pieces, model, head, family, names, size[0]))
    for name, width in family.zeros(model.config.model).items():
        yield Streamed(name, (width,), partial(_one_piece, torch.zeros(width)))
    for name, tensor in (head.transform or {}).items():
        part = tensor[:vocab_size] if name == _VOCABULARY_BIAS else tensor
        yield Streamed(_hf_name(family, name), tuple(part.shape), partial(_one_piece, part))
        if name == _VOCABULARY_BIAS and family.untied_bias and not head.is_embedding():
            yield Streamed(family.untied_bias, tuple(part.shape), partial(_one_piece, part))
    if head.matrix is not None and not head.is_embedding():
        size = (vocab_size, model.config.model.hidden_size)
        yield Streamed(_hf_name(family, HEAD), size, partial(_head_pieces, model, head, head.matrix, vocab_size))
    if head.bias_V is not None and family.head_bias is not None:
        yield Streamed(family.head_bias, (vocab_size,), partial(_one_piece, head.bias_V[:vocab_size]))


def _one_piece(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor


def _backbone_pieces(
    model: TrainedModel, head: Head, family: Family, names: Sequence[str], rows: int
) -> Iterator[Tensor]:
    """One after the other, what a stored tensor holds; of the embedding the first `rows`."""
    if names == (EMBEDDING,):
        yield from _rows_of(model, EMBEDDING, rows)
        return
    for name in names:
        weight = family.as_stored(model.config.model, name, model.weight(name))
        yield head.norm_bias(weight) if name == _NORM_BIAS else weight


def _head_pieces(model: TrainedModel, head: Head, matrix: str, rows: int) -> Iterator[Tensor]:
    first = 0
    for stored_vD in _rows_of(model, matrix, rows):
        yield head.rows(stored_vD, first)
        first += len(stored_vD)


def _rows_of(model: TrainedModel, matrix: str, rows: int) -> Iterator[Tensor]:
    """Its first rows, some at a time."""
    for block in model.blocks(matrix):
        if rows > 0:  # behind them is padding
            yield from block[:rows].split(_PIECE_ROWS)
        rows -= len(block)


def _hf_name(family: Family, name: str) -> str:
    theirs = family.their_name(name)
    if theirs is None:
        raise ValueError(f"{name} has no Hugging Face name")
    return theirs
