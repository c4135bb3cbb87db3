"""What an export consists of: its target, its tensors under their Hugging Face names, the file they are streamed to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megahead.config.objective import HeadName
from megahead.hf.families import Family, family_of
from megahead.hf.heads import Head, make_head
from megahead.hf.trained import BACKBONE, EMBEDDING, HEAD, TrainedModel

# What a trained model becomes when it is exported: decided once, before anything is written.


@dataclass(frozen=True)
class ExportTarget:
    """A trained model, and what of it goes out as what."""

    model: TrainedModel
    head: Head

    family: Family
    """Names and classes of Hugging Face's."""

    vocab_size: int
    """Rows of the exported embedding and of the head."""

    dtype: str
    """Of the stored weights."""

    @staticmethod
    def of(model: TrainedModel, head: HeadName, dtype: str, *, keep_padding: bool) -> ExportTarget:
        """With a head of this name; UserError where the model cannot have it, or is none of transformers'."""
        made = make_head(head, model, keep_padding=keep_padding)
        family = family_of(model.config.model, head_bias=made.bias_V is not None)
        vocab_size = model.config.model.padded_vocab_size() if keep_padding else model.config.model.vocab_size
        return ExportTarget(model.used(), made, family, vocab_size, dtype)

    def guesses_masked(self) -> bool:
        """Whether its head is one for masked tokens, and not for next ones."""
        return self.family.auto_with_head == "AutoModelForMaskedLM"

    def has_head(self) -> bool:
        """Whether it predicts tokens, and is not the backbone alone."""
        return self.head.matrix is not None


# Writes a safetensors file piece by piece, so that memory holds one piece and not the model.
#
# The layout is public and tiny: the header's length (8 bytes, little-endian), a JSON header with each tensor's dtype,
# shape and byte range, then the bytes, row-major and little-endian. The library's own writer wants all tensors at
# once.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Streamed:
    """A tensor that is made while it is written."""

    name: str
    shape: tuple[int, ...]

    pieces: Callable[[], Iterable[Tensor]]
    """Consecutive parts along dim 0, in any float type."""


def write_shards(folder: Path, tensors: Sequence[Streamed], dtype: torch.dtype, shard_bytes: int) -> list[Path]:
    """Writes model.safetensors, or where that is above `shard_bytes` numbered files and their index; returns the files.

    A tensor is never cut: one larger than `shard_bytes` has a file of its own.
    """
    shards = _split(tensors, dtype, shard_bytes)
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return [folder / "model.safetensors"]
    paths = [folder / f"model-{k:05}-of-{len(shards):05}.safetensors" for k in range(1, len(shards) + 1)]
    for path, shard in zip(paths, shards, strict=True):
        write_safetensors(path, shard, dtype)
    total = sum(_size(tensor, dtype) for tensor in tensors)
    places = {tensor.name: path.name for path, shard in zip(paths, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def _split(tensors: Sequence[Streamed], dtype: torch.dtype, shard_bytes: int) -> list[list[Streamed]]:
    """Consecutive tensors, as many as fit, in each shard."""
    shards: list[list[Streamed]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        size = _size(tensor, dtype)
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    return shards


def write_safetensors(path: Path, tensors: Sequence[Streamed], dtype: torch.dtype) -> None:
    """Writes `tensors` in order, rounded once to `dtype`, and waits until they are on disk.

    Raises ValueError when pieces do not add up to the shape promised.
    """
    with path.open("wb") as file:
        file.write(_header(tensors, dtype))
        for tensor in tensors:
            start = file.tell()
            for piece in tensor.pieces():
                file.write(piece.detach().to(dtype).contiguous().view(torch.uint8).numpy().data)
            if file.tell() - start != _size(tensor, dtype):
                raise ValueError(f"the pieces of {tensor.name} do not make up {tensor.shape}")
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Sequence[Streamed], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + _size(tensor, dtype)
        entries[tensor.name] = {"dtype": _CODES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes after it start aligned
    return len(text).to_bytes(8, "little") + text


def _size(tensor: Streamed, dtype: torch.dtype) -> int:
    return math.prod(tensor.shape) * dtype.itemsize


# The tensors of an export under their Hugging Face names, made piece by piece when they are written.

_NORM_BIAS = "backbone.final_norm.bias"
_VOCABULARY_BIAS = "mask_head.bias"
_PIECE_ROWS = 4096


def exported_tensors(target: ExportTarget) -> Iterator[Streamed]:
    """Every tensor of the export, the head's last."""
    model, head, family, vocab_size = target.model, target.head, target.family, target.vocab_size
    body = [name for name in model.shapes if name.startswith(BACKBONE)]  # the head's come last, the temperature in them
    for theirs in dict.fromkeys(_hf_name(family, name) for name in body):
        names = family.names.ours(theirs)
        rows, *columns = model.shapes[names[0]]
        size = (vocab_size if names == (EMBEDDING,) else rows * len(names), *columns)
        exported = theirs.removeprefix(family.names.prefix) if head.matrix is None else theirs
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
    theirs = family.names.table.theirs(name)
    if theirs is None:
        raise ValueError(f"{name} has no Hugging Face name")
    return theirs
