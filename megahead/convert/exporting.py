"""Exports a checkpoint as a Hugging Face folder, which appears only once its outputs equal the checkpoint's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from megahead.config import HeadName
from megahead.convert.card import model_card
from megahead.convert.export_settings import write_json, write_settings
from megahead.convert.export_target import ExportTarget
from megahead.convert.export_tensors import exported_tensors
from megahead.convert.source import TrainedModel
from megahead.convert.stream import DTYPES, write_shards
from megahead.convert.verify import Parity, verify
from megahead.corpus.tokenizer import has_mark, tokenizer_mark
from megahead.errors import CheckpointError, FieldError
from megahead.files import sha256_of, staged_folder

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
    `ModernBertForMaskedLM`, where it is causal a `ModernBertDecoderForCausalLM`; a Llama becomes a `LlamaForCausalLM`,
    `Qwen2ForCausalLM` or `Qwen3ForCausalLM`, and with a bias in its head the class of `megahead/convert/ernie.py`.

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
    target = ExportTarget.of(model, head, dtype, keep_padding=keep_padding)
    with staged_folder(output_dir, replaceable=PARITY_FILE) as folder:
        write_shards(folder, list(exported_tensors(target)), DTYPES[dtype], shard_bytes)
        tokenizer = write_settings(folder, target)
        parity = verify(folder, target)
        origin = {"source": fingerprint(model)} | _tokenizer_of(model, folder)
        write_json(folder / PARITY_FILE, {**parity.record(), "head": head, **origin})
        (folder / "README.md").write_text(model_card(target, parity), encoding="utf-8")
    return ExportReport(output_dir, head, dtype, parity, tokenizer, time.monotonic() - begin)


def _tokenizer_of(model: TrainedModel, folder: Path) -> dict[str, str]:
    """By what the tokenizer that was written is known; CheckpointError where the run's file is no longer the one that
    it was trained with."""
    mark, source, written = model.tokenizer_mark(), model.tokenizer(), folder / "tokenizer.json"
    if mark is not None and source is not None and not has_mark(source, mark):
        raise CheckpointError(f"`{source}` must be the tokenizer of the run, but is another one; put that back.")
    return {"tokenizer": tokenizer_mark(written)} if written.is_file() else {}


def fingerprint(model: TrainedModel) -> str:
    """Identifies a checkpoint: the checksum of its manifest, which holds those of all files."""
    return sha256_of(model.checkpoint.folder / "checkpoint.json")
