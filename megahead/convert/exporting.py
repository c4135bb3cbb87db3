"""Exports a checkpoint as a Hugging Face folder, which appears only once its outputs equal the checkpoint's."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megahead.config import HeadName
from megahead.convert.card import model_card, write_encoder_tokenizer, write_tokenizer
from megahead.convert.export_heads import Head, make_head
from megahead.convert.families import Family, family_of, hf_config
from megahead.convert.source import BACKBONE, EMBEDDING, HEAD, TrainedModel
from megahead.convert.stream import DTYPES, Streamed, write_shards
from megahead.convert.verify import Parity, verify
from megahead.errors import FieldError
from megahead.files import sha256_of, staged_folder

PARITY_FILE = "parity.json"
_NORM_BIAS = "backbone.final_norm.bias"
_VOCABULARY_BIAS = "mask_head.bias"
_PIECE_ROWS = 4096
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

    seconds: float


def export(
    checkpoint: str | PathLike[str],
    output_dir: str | PathLike[str],
    head: HeadName,
    *,
    dtype: str = "float32",
    keep_padding: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> ExportReport:
    """Writes `output_dir` as transformers reads it: a `GPTNeoXForCausalLM`, or a `GPTNeoXModel` for the head `none`.

    An encoder becomes a `BertForMaskedLM` or `BertModel`, without token types a DistilBERT, or a
    `ModernBertForMaskedLM`; a Llama becomes a `LlamaForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`, and with a
    bias in its head the class of `megahead/convert/ernie.py`.

    checkpoint: a step folder, or a run (its newest). keep_padding: keep the rows that pad the vocabulary; so that they
    get no probability, a decoder's head is then stored separately from its embedding, with a bias folded in.
    shard_bytes: larger weights are written as several files.
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
    made = make_head(head, model, keep_padding=keep_padding)
    with staged_folder(output_dir, replaceable=PARITY_FILE) as folder:
        vocab_size = model.config.model.padded_vocab_size() if keep_padding else model.config.model.vocab_size
        write_shards(folder, list(_tensors(model, made, vocab_size)), DTYPES[dtype], shard_bytes)
        tokenizer = _write_settings(folder, model, made, dtype, vocab_size)
        parity = verify(folder, model, made, dtype)
        _write_json(folder / PARITY_FILE, {**parity.record(), "head": head, "source": fingerprint(model)})
        (folder / "README.md").write_text(model_card(model, made, dtype, parity), encoding="utf-8")
    return ExportReport(output_dir, head, dtype, parity, tokenizer, time.monotonic() - begin)


def fingerprint(model: TrainedModel) -> str:
    """Identifies a checkpoint: the checksum of its manifest, which holds those of all files."""
    return sha256_of(model.checkpoint.folder / "checkpoint.json")


def _tensors(model: TrainedModel, head: Head, vocab_size: int) -> Iterator[Streamed]:
    """Every tensor of the export under its Hugging Face name, the head's last."""
    family = family_of(model.config.model, head_bias=head.bias_V is not None)
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


def _write_settings(folder: Path, model: TrainedModel, head: Head, dtype: str, vocab_size: int) -> Path | None:
    """Writes config.json, generation_config.json and the tokenizer files; returns the tokenizer's source."""
    config, end = model.config, model.config.data.end_token
    family = family_of(config.model, head_bias=head.bias_V is not None)
    tokenizer = model.tokenizer()
    if config.masking is not None:
        first, last = config.masking.cls_token, config.masking.sep_token
        ids = {"pad_token_id": 0, "bos_token_id": first, "cls_token_id": first}
        ids |= {"eos_token_id": last, "sep_token_id": last}
        ids |= {} if tokenizer is None else write_encoder_tokenizer(tokenizer, folder, config)
    else:
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        ids |= {} if tokenizer is None else write_tokenizer(tokenizer, folder, config)
    architecture = family.backbone if head.matrix is None else family.with_head
    tied = head.is_embedding()
    content = hf_config(family, head.shape(config.model), vocab_size=vocab_size, architecture=architecture, tied=tied)
    origin = {
        "run": config.name,
        "head": head.name,
        "objective": config.objective.model_dump(),
        "step": model.checkpoint.step,
        "tokens": model.checkpoint.state.get("tokens"),
    }
    _write_json(folder / "config.json", {**content, **ids, "dtype": dtype, "megahead": origin})
    if head.matrix is not None and not config.model.is_encoder():
        _write_json(folder / "generation_config.json", ids)
    return tokenizer


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
