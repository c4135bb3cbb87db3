"""Exports a checkpoint as a Hugging Face folder, which appears only once its outputs equal the checkpoint's."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from megahead.checkpoints.disk import find_checkpoint
from megahead.checkpoints.store import without_digits
from megahead.config.objective import HeadName
from megahead.data.tokenizer import has_fingerprint, tokenizer_fingerprint
from megahead.errors import CheckpointError, FieldError
from megahead.files import atomic_folder, sha256_of
from megahead.hf.card import CardFacts, model_card, served_by
from megahead.hf.families import Family
from megahead.hf.heads import DTYPES, ExportTarget, Head, best_head
from megahead.hf.settings import write_json, write_settings
from megahead.hf.trained import BACKBONE, EMBEDDING, HEAD, TrainedModel
from megahead.hf.verify import Parity, verify

PARITY_FILE = "parity.json"
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportReport:
    """What was exported, and how exactly."""

    folder: Path
    head: HeadName
    dtype: str
    parity: Parity
    tokenizer: Path | None
    """The source of the tokenizer; None if the run has none, and so the export."""

    conflict: str | None
    """Why settings of the folder that the run began from were left out; None where they were not."""

    seconds: float

    served: str
    """Which heads of such a model vLLM and llama.cpp serve."""


def export(
    checkpoint: str | PathLike[str],
    output_dir: str | PathLike[str],
    head: HeadName,
    *,
    dtype: str = "float32",
    keep_padding: bool = False,
    shard_bytes: int = SHARD_BYTES,
    card: CardFacts | None = None,
) -> ExportReport:
    """Writes `output_dir` as transformers reads it: a `GPTNeoXForCausalLM`, or a `GPTNeoXModel` for the head `none`.

    An encoder becomes a `BertForMaskedLM` or `BertModel`, without token types a DistilBERT, or a
    `ModernBertForMaskedLM`, where it is causal a `ModernBertDecoderForCausalLM`; a Llama becomes a `LlamaForCausalLM`,
    `Qwen2ForCausalLM` or `Qwen3ForCausalLM`, and with a bias in its head the class of `megahead/hf/decoders.py`.

    checkpoint: a step folder, or a run (its newest). keep_padding: keep the rows that pad the vocabulary; so that they
    get no probability, a decoder's head is then stored separately from its embedding, with a bias folded in.
    shard_bytes: larger weights are written as several files. card: what the model card says beside what it knows.
    At the end outputs on random and real tokens are compared, see parity.json. An earlier export in `output_dir` is
    replaced; after an error (UserError) nothing of the new one is left.

    Cost: memory for a block of 16,384 rows of a table, the largest other tensor and the logits of the comparison, for
    which transformers then reads the exported tables one at a time (an encoder is held whole). The comparison reads
    both models from disk once more.
    """
    begin = time.monotonic()
    if dtype not in DTYPES:
        raise FieldError("--dtype", f"be one of {', '.join(DTYPES)}", got=dtype)
    if shard_bytes < 1:
        raise FieldError("--shard-size", "be above 0", got=shard_bytes)
    model, output_dir = TrainedModel.open(Path(checkpoint)), Path(output_dir)
    target = ExportTarget.of(model, head, dtype, keep_padding=keep_padding)
    with atomic_folder(output_dir, replaceable=PARITY_FILE) as folder:
        write_shards(folder, list(exported_tensors(target)), DTYPES[dtype], shard_bytes)
        tokenizer, conflict = write_settings(folder, target)
        parity = verify(folder, target)
        origin = {"source": fingerprint(model)} | _tokenizer_of(model, folder)
        write_json(folder / PARITY_FILE, {**asdict(parity), "head": head, **origin})
        (folder / "README.md").write_text(
            model_card(target, parity, card or CardFacts(output_dir.name)), encoding="utf-8"
        )
    return ExportReport(
        output_dir, head, dtype, parity, tokenizer, conflict, time.monotonic() - begin, served_by(target)
    )


def _tokenizer_of(model: TrainedModel, folder: Path) -> dict[str, str]:
    """By what the tokenizer that was written is known; CheckpointError where the run's file is no longer the one that
    it was trained with."""
    fingerprint, source, written = model.tokenizer_fingerprint(), model.tokenizer(), folder / "tokenizer.json"
    if fingerprint is not None and source is not None and not has_fingerprint(source, fingerprint):
        raise CheckpointError(f"`{source}` must be the tokenizer of the run, but is another one; put that back.")
    return {"tokenizer": tokenizer_fingerprint(written)} if written.is_file() else {}


def fingerprint(model: TrainedModel) -> str:
    """Identifies a checkpoint: the checksum of its manifest, which holds those of all files."""
    return sha256_of(model.checkpoint.folder / "checkpoint.json")


# The tensors of an export under their Hugging Face names, made piece by piece when they are written.

_NORM_BIAS = "backbone.final_norm.bias"
_VOCABULARY_BIAS = "mask_head.bias"
_PIECE_ROWS = 4096


def exported_tensors(target: ExportTarget) -> Iterator[Streamed]:
    """Every tensor of the export, the head's last."""
    model, head, family, vocab_size = target.model, target.head, target.family, target.vocab_size
    body = [name for name in model.shapes if name.startswith(BACKBONE) and name != EMBEDDING]
    for theirs in dict.fromkeys(_hf_name(family, name) for name in (EMBEDDING, *body)):
        names = family.ours(theirs)
        rows, *columns = model.shapes[names[0]]
        size = (vocab_size if names == (EMBEDDING,) else rows * len(names), *columns)
        exported = theirs.removeprefix(family.prefix) if head.matrix is None else theirs
        yield Streamed(exported, size, partial(_backbone_pieces, model, head, family, names, size[0]))
    for name, width in family.zeros(model.config.model).items():
        yield _whole(name, torch.zeros(width))
    for name, tensor in (head.transform or {}).items():
        part = tensor[:vocab_size] if name == _VOCABULARY_BIAS else tensor
        yield _whole(_hf_name(family, name), part)
        if name == _VOCABULARY_BIAS and family.untied_bias and not head.is_embedding():
            yield _whole(family.untied_bias, part)
    if head.matrix is not None and not head.is_embedding():
        size = (vocab_size, model.config.model.hidden_size)
        yield Streamed(_hf_name(family, HEAD), size, partial(_head_pieces, model, head, head.matrix, vocab_size))
    if head.bias_V is not None and family.head_bias is not None:
        yield _whole(family.head_bias, head.bias_V[:vocab_size])


def _whole(name: str, tensor: Tensor) -> Streamed:
    return Streamed(name, tuple(tensor.shape), lambda: [tensor])


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
    theirs = family.table.theirs(name)
    if theirs is None:
        raise ValueError(f"{name} has no Hugging Face name")
    return theirs


# Writes a safetensors file piece by piece, so that memory holds one piece and not the model.
#
# The layout is public and tiny: the header's length (8 bytes, little-endian), a JSON header with each tensor's dtype,
# shape and byte range, then the bytes, row-major and little-endian. The library's own writer wants all tensors at
# once.

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
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: _size(tensor, dtype),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_safetensors(folder / file, [by_name[name] for name in names], dtype)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    return [folder / file for file in split.filename_to_tensors]


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


# The Hugging Face folder of a model that a user names.


def hf_folder(path: Path) -> Path:
    """`path` if it is a Hugging Face folder; of a run or checkpoint, its export with the best head it has.

    Exports are kept in RUN/exports/ and made again when the checkpoint is another one. CheckpointError if `path`
    is neither.
    """
    return _folder(path, best_head)


def hf_folder_to_classify(path: Path) -> Path:
    """The same for what gets a classifier: of a decoder the body alone, since some classes that have its head are
    none that transformers classifies with; of an encoder as it is, as ModernBERT's classifier begins with its head."""
    return _folder(path, lambda model: best_head(model) if model.config.model.is_encoder() else "none")


def _folder(path: Path, choose_head: Callable[[TrainedModel], HeadName]) -> Path:
    if (path / "config.json").is_file():
        return path
    if find_checkpoint(path) is None:
        raise CheckpointError(f"`{path}` must be a Hugging Face model folder, a run or a checkpoint, but is none.")
    model = TrainedModel.open(path)
    head = choose_head(model)
    output = model.run_folder().exports / f"{without_digits(model.checkpoint.folder.name)}-{head}"
    lacks_tokenizer = model.tokenizer() is not None and not (output / "tokenizer.json").is_file()
    try:
        source = json.loads((output / PARITY_FILE).read_text(encoding="utf-8"))["source"]
    except (OSError, ValueError, KeyError):
        source = None
    if lacks_tokenizer or source != fingerprint(model):
        export(model.checkpoint.folder, output, head)
    return output


class Origin(NamedTuple):
    """The run that an export came from, and how far it was."""

    run: str
    tokens: int


def origin(folder: Path) -> Origin:
    """Where an export of ours came from; CheckpointError for another folder."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))["megahead"]
        return Origin(content["run"], int(content["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"`{folder}` must name its run and tokens to be drawn on a curve, but does not; name the run's checkpoints."
        ) from None
