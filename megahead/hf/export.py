"""Exports a checkpoint as a Hugging Face folder, once its outputs have been verified against the checkpoint's."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from megahead.checkpoints.disk import find_checkpoint
from megahead.checkpoints.store import without_suffix
from megahead.config.objective import HeadName
from megahead.data.tokenizer import has_fingerprint, tokenizer_fingerprint
from megahead.errors import CheckpointError, FieldError
from megahead.files import atomic_folder, read_json_object, sha256_of
from megahead.hf.card import CardMetadata, model_card, serving_support_of
from megahead.hf.families import Family
from megahead.hf.heads import DTYPES, ExportTarget, Head, best_head
from megahead.hf.loading import is_encoder, read_context_length
from megahead.hf.other_programs import require_pooling, write_pooling
from megahead.hf.settings import write_json, write_settings
from megahead.hf.trained import BACKBONE, EMBEDDING, HEAD, TrainedModel
from megahead.hf.verify import Parity, verify

PARITY_FILE = "parity.json"
VERSION = 3  # raised when exports of the same checkpoint change; in 3, decoders' tokenizers add no special tokens
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportReport:
    """Facts about an export, and the errors of its outputs."""

    folder: Path
    head: HeadName
    dtype: str
    parity: Parity
    tokenizer: Path | None
    """Source of the tokenizer; None if run and export have none."""

    settings_conflict: str | None
    """Why settings of the folder that the run started from were not used, or None."""

    seconds: float

    serving_support: str
    """Which heads of such a model vLLM and llama.cpp serve."""


def export(
    checkpoint: str | PathLike[str],
    output_dir: str | PathLike[str],
    head: HeadName,
    *,
    dtype: str = "float32",
    keep_padding: bool = False,
    shard_bytes: int = SHARD_BYTES,
    card: CardMetadata | None = None,
    pooling: str | None = None,
) -> ExportReport:
    """Writes `output_dir` as transformers reads it: a `GPTNeoXForCausalLM`, or a `GPTNeoXModel` for the head `none`.

    An encoder becomes a `BertForMaskedLM` or `BertModel`, without token types a DistilBERT, or a
    `ModernBertForMaskedLM`, where it is causal a `ModernBertDecoderForCausalLM`; a Llama becomes a `LlamaForCausalLM`,
    `Qwen2ForCausalLM` or `Qwen3ForCausalLM`, and with a bias in its head the class of `megahead/hf/decoders.py`.

    checkpoint: a step folder, or a run (its newest). keep_padding: keep the rows that pad the vocabulary; a decoder's
    head is then stored separately from its embedding, with a bias folded in that gives these rows no probability.
    shard_bytes: larger weights are written as several files. card: settings of the model card. pooling: of an encoder,
    `cls` or `mean`; sentence-transformers can then load the folder. At the end, outputs on random and real tokens are
    compared, see parity.json. An earlier export in `output_dir` is replaced; after an error (UserError) nothing is
    written.

    Cost: memory for a block of 16,384 rows of a table, the largest other tensor and the logits of the comparison, for
    which transformers reads the exported layers one at a time (an encoder is loaded whole). The comparison reads both
    models from disk once more.
    """
    start = time.monotonic()
    if dtype not in DTYPES:
        raise FieldError("--dtype", f"be one of {', '.join(DTYPES)}", got=dtype)
    if shard_bytes < 1:
        raise FieldError("--shard-size", "be above 0", got=shard_bytes)
    model, output_dir = TrainedModel.open(Path(checkpoint)), Path(output_dir)
    target = ExportTarget.from_model(model, head, dtype, keep_padding=keep_padding)
    if pooling is not None:
        require_pooling(pooling, is_masked_lm=target.is_masked_lm())
    with atomic_folder(output_dir, replaceable=PARITY_FILE) as folder:
        tensors = list(iter_export_tensors(target))
        write_shards(folder, tensors, DTYPES[dtype], shard_bytes)
        tokenizer, conflict = write_settings(folder, target)
        if pooling is not None:
            context = read_context_length(folder) or model.config.model.max_positions
            write_pooling(folder, pooling, model.config.model.hidden_size, context)
        parity = verify(folder, target)
        fingerprints = _source_fingerprint(model) | _tokenizer_fingerprint(model, folder)
        write_json(folder / PARITY_FILE, {**asdict(parity), "head": head, **fingerprints})
        metadata = replace(card or CardMetadata(output_dir.name), pooling=pooling)
        num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        card_text = model_card(target, parity, metadata, num_parameters)
        (folder / "README.md").write_text(card_text, encoding="utf-8")
    seconds, support = time.monotonic() - start, serving_support_of(target)
    return ExportReport(output_dir, head, dtype, parity, tokenizer, conflict, seconds, support)


def _tokenizer_fingerprint(model: TrainedModel, folder: Path) -> dict[str, str]:
    """Returns the `tokenizer` entry of parity.json, empty without a tokenizer; CheckpointError if the run's file is not
    the tokenizer that it was trained with."""
    fingerprint, source, exported = model.tokenizer_fingerprint(), model.tokenizer_path(), folder / "tokenizer.json"
    if fingerprint is not None and source is not None and not has_fingerprint(source, fingerprint):
        raise CheckpointError(f"`{source}` must be the tokenizer of the run, but is another one; put that back.")
    return {"tokenizer": tokenizer_fingerprint(exported)} if exported.is_file() else {}


def _source_fingerprint(model: TrainedModel) -> dict[str, str | int]:
    """What an export is made from: the checksum of the checkpoint's manifest, which has those of all its files, and
    VERSION."""
    return {"source": sha256_of(model.checkpoint.folder / "checkpoint.json"), "version": VERSION}


# The tensors of an export under their Hugging Face names, computed chunk by chunk while they are written.

_NORM_BIAS = "backbone.final_norm.bias"
_VOCABULARY_BIAS = "mask_head.bias"
_CHUNK_ROWS = 4096


def iter_export_tensors(target: ExportTarget) -> Iterator[StreamedTensor]:
    """Yields every tensor of the export, the head's last."""
    model, head, family, vocab_size = target.model, target.head, target.family, target.vocab_size
    backbone = [name for name in model.shapes if name.startswith(BACKBONE) and name != EMBEDDING]
    hf_names = dict.fromkeys(map(family.names.to_hf, (EMBEDDING, *backbone)))
    for hf_name in hf_names:
        names = family.parameter_names(hf_name)
        num_rows, *columns = model.shapes[names[0]]
        shape = (vocab_size if names == (EMBEDDING,) else num_rows * len(names), *columns)
        exported_name = hf_name.removeprefix(family.base_model_prefix) if head.matrix is None else hf_name
        chunks: Callable[[], Iterable[Tensor]] = partial(_backbone_chunks, model, head, family, names, shape[0])
        if hf_name.endswith(family.transposed_names):
            shape, chunks = shape[::-1], partial(_transposed, chunks)
        yield StreamedTensor(exported_name, shape, chunks)
        bias = hf_name.removesuffix("weight") + "bias"
        if hf_name.endswith(family.weights_with_bias) and bias not in hf_names:  # the class has one, the model none
            yield _streamed(exported_name.removesuffix("weight") + "bias", torch.zeros(shape[0]))
    for name, tensor in (head.transform or {}).items():
        exported = tensor[:vocab_size] if name == _VOCABULARY_BIAS else tensor
        yield _streamed(family.names.to_hf(name), exported)
        if name == _VOCABULARY_BIAS and family.untied_bias_name and not head.is_tied():
            yield _streamed(family.untied_bias_name, exported)
    if head.matrix is not None and not head.is_tied():
        shape = (vocab_size, model.config.model.hidden_size)
        chunks = partial(_head_chunks, model, head, head.matrix, vocab_size)
        yield StreamedTensor(family.names.to_hf(HEAD), shape, chunks)
    if head.bias_V is not None and family.head_bias_name is not None:
        yield _streamed(family.head_bias_name, head.bias_V[:vocab_size])


def _streamed(name: str, tensor: Tensor) -> StreamedTensor:
    return StreamedTensor(name, tuple(tensor.shape), lambda: [tensor])


def _backbone_chunks(
    model: TrainedModel, head: Head, family: Family, names: Sequence[str], num_rows: int
) -> Iterator[Tensor]:
    """Yields the parameters of a stored tensor; of the embedding the first `num_rows` rows."""
    if names == (EMBEDDING,):
        yield from model.blocks(EMBEDDING, num_rows)
        return
    for name in names:
        weight = family.to_hf_tensor(model.config.model, name, model.weight(name))
        yield head.exported_norm_bias(weight) if name == _NORM_BIAS else weight  # may hold the head's bias, folded in


def _transposed(chunks: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
    return [torch.cat(list(chunks())).T]


def _head_chunks(model: TrainedModel, head: Head, matrix: str, num_rows: int) -> Iterator[Tensor]:
    first = 0
    for block in model.blocks(matrix, num_rows):
        for stored_vD in block.split(_CHUNK_ROWS):
            yield head.exported_rows(stored_vD, first)
            first += len(stored_vD)


# Writes a safetensors file chunk by chunk, so that memory holds one chunk and not the model.
#
# The layout is public and tiny: the header's length (8 bytes, little-endian), a JSON header with each tensor's dtype,
# shape and byte range, then the bytes, row-major and little-endian. The library's own writer needs all tensors at
# once.

_DTYPE_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor that is computed while it is written."""

    name: str
    shape: tuple[int, ...]

    chunks: Callable[[], Iterable[Tensor]]
    """Consecutive parts along dim 0, in any float dtype."""


def write_shards(folder: Path, tensors: Sequence[StreamedTensor], dtype: torch.dtype, shard_bytes: int) -> list[Path]:
    """Writes model.safetensors, or if that is larger than `shard_bytes`, numbered files and their index; returns the
    files.

    A tensor is never split: one larger than `shard_bytes` has a file of its own.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: _num_bytes(tensor, dtype),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_safetensors(folder / file, [by_name[name] for name in names], dtype)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    return [folder / file for file in split.filename_to_tensors]


def write_safetensors(path: Path, tensors: Sequence[StreamedTensor], dtype: torch.dtype) -> None:
    """Writes `tensors` in order, rounded once to `dtype`; ValueError if chunks do not add up to a tensor's shape."""
    with path.open("wb") as file:
        file.write(_header(tensors, dtype))
        for tensor in tensors:
            start = file.tell()
            for chunk in tensor.chunks():
                file.write(chunk.detach().to(dtype).contiguous().view(torch.uint8).numpy().data)
            if file.tell() - start != _num_bytes(tensor, dtype):
                raise ValueError(f"the chunks of {tensor.name} do not add up to {tensor.shape}")


def _header(tensors: Sequence[StreamedTensor], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + _num_bytes(tensor, dtype)
        entries[tensor.name] = {"dtype": _DTYPE_CODES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes after it start aligned
    return len(text).to_bytes(8, "little") + text


def _num_bytes(tensor: StreamedTensor, dtype: torch.dtype) -> int:
    return math.prod(tensor.shape) * dtype.itemsize


# The Hugging Face folder of a model that a user names: exported first, where it is a run or checkpoint.


def ensure_hf_folder(path: Path, choose_head: Callable[[TrainedModel], HeadName] = best_head) -> Path:
    """Returns `path` if it is a Hugging Face folder; for a run or checkpoint, its export with the head that
    `choose_head` returns, by default the best.

    Exports are written to RUN/exports/ and reused while the checkpoint and VERSION are the same. CheckpointError if
    `path` is neither.
    """
    model = _open_run(path)
    if model is None:
        return path
    head = choose_head(model)
    output = model.run_folder().exports / f"{without_suffix(model.checkpoint.folder.name)}-{head}"
    is_tokenizer_missing = model.tokenizer_path() is not None and not (output / "tokenizer.json").is_file()
    made_from = read_json_object(output / PARITY_FILE)
    if is_tokenizer_missing or not _source_fingerprint(model).items() <= made_from.items():
        export(model.checkpoint.folder, output, head)
    return output


def ensure_encoder_folder(path: Path) -> Path:
    """As `ensure_hf_folder`; CheckpointError for a decoder, before it is exported."""
    if not holds_encoder(path):
        raise CheckpointError(f"`{path}` must hold an encoder, whose [CLS] reads the whole text, but does not.")
    return ensure_hf_folder(path)


def ensure_decoder_folder(path: Path) -> Path:
    """As `ensure_hf_folder`; CheckpointError for an encoder, before it is exported."""
    if holds_encoder(path):
        raise CheckpointError(f"`{path}` must hold a decoder, which predicts what comes next, but holds an encoder.")
    return ensure_hf_folder(path)


def holds_encoder(path: Path) -> bool:
    """Whether the Hugging Face folder, run or checkpoint `path` has a model that predicts masked tokens.
    CheckpointError if `path` is none of these."""
    run = _open_run(path)
    return is_encoder(path) if run is None else run.config.model.is_encoder() and not run.config.model.is_causal


def ensure_classifier_folder(path: Path) -> Path:
    """Returns a folder to load a classifier from, as `ensure_hf_folder`. A decoder is exported without a head: some
    classes with a head have no classifier. An encoder keeps its head: ModernBERT's classifier starts with the head's
    layers."""
    return ensure_hf_folder(path, lambda model: best_head(model) if model.config.model.is_encoder() else "none")


def _open_run(path: Path) -> TrainedModel | None:
    """The model of a run or checkpoint; None for a Hugging Face folder."""
    if (path / "config.json").is_file():
        return None
    if find_checkpoint(path) is None:
        raise CheckpointError(f"`{path}` must be a Hugging Face model folder, a run or a checkpoint, but is none.")
    return TrainedModel.open(path)
