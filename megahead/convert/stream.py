"""Writes a safetensors file piece by piece, so that memory holds one piece and not the model.

The layout is public and tiny: the header's length (8 bytes, little-endian), a JSON header with each tensor's dtype,
shape and byte range, then the bytes, row-major and little-endian. The library's own writer wants all tensors at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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
