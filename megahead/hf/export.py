"""Exports a checkpoint as a Hugging Face folder, which appears only once its outputs equal the checkpoint's."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from megahead.checkpoints.folders import find_checkpoint
from megahead.config.model import ModelConfig
from megahead.config.objective import HeadName, ObjectiveConfig
from megahead.config.run import RunConfig
from megahead.data.sentencepiece_model import is_sentencepiece
from megahead.data.tokenizer import has_mark, load_tokenizer, tokenizer_mark
from megahead.errors import CheckpointError, DataError, FieldError
from megahead.files import sha256_of, staged_folder
from megahead.hf.export_target import DTYPES, ExportTarget, exported_tensors, write_shards
from megahead.hf.heads import Head, best_head
from megahead.hf.kept_settings import CONFIG, GENERATION, KeptSettings
from megahead.hf.trained import TrainedModel, code_version, dataset_names, last_evaluation
from megahead.hf.verify import Parity, verify
from megahead.wording import counted

# The model card of an export.

_HEADS = {
    "none": "none: the backbone alone, outputs are hidden states",
    "tied": "`E h`, the input embedding itself",
    "pmi": "`E h + log q`, training-free: q is the distribution of the training targets (of all candidates, where the "
    "objective has others), ",
    "trained": "the one that was trained",
}
_PADDED = ", and rows of padding that are never probable: their bias is "
_BIASED = ", with a bias for each token, which is "
_FOLDED, _STORED = "folded into the head's own weights", "the head's own"


def model_card(target: ExportTarget, parity: Parity) -> str:
    """README.md of an export."""
    model, config, objective = target.model, target.model.config, target.model.config.objective
    tokens, shape = model.checkpoint.state.get("tokens"), config.model
    learned = "contrastive weight tying (headless)" if objective.name == "headless" else "vanilla softmax"
    errors = ", ".join(f"{error:.1e} in {kind}" for kind, error in parity.largest_error.items())
    loader = target.family.auto_with_head if target.has_head() else "AutoModel"
    facts = {
        "Objective": f"{learned}, temperature {model.temperature():g}",
        "Shape": f"{counted(shape.num_layers, 'layer')}, width {shape.hidden_size}, {counted(shape.num_heads, 'head')}",
        "Trained for": counted(model.checkpoint.step, "step")
        + (f", {counted(tokens, 'token')}" if tokens is not None else ""),
        "Data": dataset_names(config.data),
        "Held-out text": last_evaluation(model) or "not evaluated",
        "Head": _head(target.head, objective),
        "Stored as": target.dtype,
        "Largest error": f"{errors}, of {parity.compared} up to {parity.largest_output:.1f}, against the checkpoint",
        "Exported by": code_version(),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return _CARD.format(name=config.name, table=table, loader=loader, family=target.family.title)


def _head(head: Head, objective: ObjectiveConfig) -> str:
    place = _STORED if head.bias_V is not None else _FOLDED
    if head.name == "pmi":
        return _HEADS["pmi"] + place
    if head.folded is None and head.bias_V is None:
        return _HEADS[head.name]
    return _HEADS[head.name] + (_BIASED if objective.output_bias else _PADDED) + place


_CARD = """---
library_name: transformers
tags: [headless, contrastive-weight-tying]
---
# {name}

A {family} model, pretrained and exported with megahead.

| | |
|---|---|
{table}

```python
from transformers import AutoTokenizer, {loader}

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = {loader}.from_pretrained("PATH")
```

The method: N. Godey, E. de la Clergerie, B. Sagot, *Headless Language Models: Learning without Predicting with
Contrastive Weight Tying*, ICLR 2024, arXiv 2309.08351.
"""


# The tokenizer of an export, as transformers (4 and 5) reads it.

PADDING_TOKEN = "<|padding|>"
PADDING_TOKENS = ("[PAD]", PADDING_TOKEN, "<pad>")


def write_tokenizer(source: Path, folder: Path, config: RunConfig) -> dict[str, int]:
    """Copies `source` and adds its settings; returns the ids that generation needs. Beside a SentencePiece model is the
    tokenizer.json that gives the same ids.

    Special tokens are the tokenizer's own, none is added: the end token, which also begins texts, as in training;
    those for padding and for unknown characters where it has them, else the end token again.
    Raises DataError for a tokenizer that cannot be this model's.
    """
    vocabulary, end_token = _opened(source, config.model.vocab_size), config.data.end_token
    end, own = _spelling(vocabulary, source, "data.end_token", end_token), load_tokenizer(source).roles
    padding_id = own.get("padding", vocabulary.token_to_id(PADDING_TOKEN))
    ids = {"pad_token": end_token if padding_id is None else padding_id, "unk_token": own.get("unknown", end_token)}
    special = {"bos_token": end, "eos_token": end} | {
        name: str(vocabulary.id_to_token(id_)) for name, id_ in ids.items()
    }
    _copy(source, vocabulary, folder)
    _write_settings(folder, special, {"model_max_length": config.model.max_positions})
    return {"pad_token_id": ids["pad_token"]}


def write_encoder_tokenizer(source: Path, folder: Path, config: RunConfig) -> dict[str, int]:
    """The same for an encoder, whose tokenizer puts [CLS] before a text and [SEP] behind, also between two texts; where
    it is causal nothing behind, so that it may go on.

    Returns the ids that the model needs.
    """
    masking, vocabulary = config.masking, _opened(source, config.model.vocab_size)
    assert masking is not None
    ids = {"cls_token": masking.cls_token, "sep_token": masking.sep_token, "mask_token": masking.mask_token}
    special = {name: _spelling(vocabulary, source, f"masking.{name}", id_) for name, id_ in ids.items()}
    own = [str(vocabulary.id_to_token(id_)) for role, id_ in load_tokenizer(source).roles.items() if role == "padding"]
    found = {name: vocabulary.token_to_id(name) for name in (*own, *PADDING_TOKENS, special["sep_token"])}
    special["pad_token"] = next(name for name, id_ in found.items() if id_ is not None)
    special["unk_token"] = "[UNK]" if vocabulary.token_to_id("[UNK]") is not None else special["pad_token"]
    cls, sep = special["cls_token"], special["sep_token"]
    closings = [""] * 2 if config.model.is_causal else [f" {sep}:{kind}" for kind in (0, 1)]
    if config.model.is_causal:
        end = _spelling(vocabulary, source, "data.end_token", config.data.end_token)
        special |= {"bos_token": cls, "eos_token": end}
    vocabulary.no_padding()
    vocabulary.no_truncation()
    vocabulary.post_processor = TemplateProcessing(
        single=f"{cls}:0 $A:0{closings[0]}",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1{closings[1]}",
        special_tokens=[(cls, masking.cls_token), (sep, masking.sep_token)],
    )
    _copy(source, vocabulary, folder)
    vocabulary.save(str(folder / "tokenizer.json"))
    inputs = ["input_ids", *(["token_type_ids"] if config.model.token_types > 1 else []), "attention_mask"]
    _write_settings(folder, special, {"model_max_length": config.model.max_positions, "model_input_names": inputs})
    return {"pad_token_id": int(vocabulary.token_to_id(special["pad_token"]) or 0)}


def _opened(source: Path, vocab_size: int) -> tokenizers.Tokenizer:
    vocabulary = tokenizers.Tokenizer.from_str(load_tokenizer(source).content())
    ids = max(vocabulary.get_vocab(with_added_tokens=True).values()) + 1
    if ids > vocab_size:
        raise DataError(f"`{source}` must have at most {vocab_size} ids (model.vocab_size), but has {ids} instead.")
    return vocabulary


def _copy(source: Path, vocabulary: tokenizers.Tokenizer, folder: Path) -> None:
    """The file itself, and for a SentencePiece model what stands for it."""
    if is_sentencepiece(source):
        shutil.copyfile(source, folder / "tokenizer.model")
        vocabulary.save(str(folder / "tokenizer.json"))
    else:
        (folder / "tokenizer.json").write_text(load_tokenizer(source).content(), encoding="utf-8")


def _spelling(vocabulary: tokenizers.Tokenizer, source: Path, field: str, id_: int) -> str:
    token = vocabulary.id_to_token(id_)
    if token is None:
        raise DataError(f"`{source}` must have a token with the id of {field} ({id_}), but has none.")
    return str(token)


def _write_settings(folder: Path, special: dict[str, str], more: dict[str, object]) -> None:
    shared = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, content in (
        ("special_tokens_map.json", special),
        ("tokenizer_config.json", {**special, **shared, **more}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# An export's settings: config.json, generation_config.json, and the tokenizer's files.


def write_settings(folder: Path, target: ExportTarget) -> Path | None:
    """Writes config.json, generation_config.json and the tokenizer files; returns the tokenizer's source.

    Those of the folder that a run began from stay as they are, but for what the run changed; where it reads or ends
    texts in another way, and in all other runs, special tokens are those of its config.
    """
    model = target.model
    tokenizer, kept = model.tokenizer(), KeptSettings.of_run(model.run_folder())
    if kept is not None and not kept.hold_for(model.config, tokenizer):
        kept = None
    if kept is None:
        ids = _files_of_run(folder, target, tokenizer)
        content, generation = _of_run(target) | ids, ids
    else:
        kept.write(folder)
        if tokenizer is None and (folder / "tokenizer.json").is_file():
            tokenizer = model.run_folder().published
        content, generation = _of_kept(target, kept), kept.content(GENERATION)
    write_json(folder / CONFIG, content)
    if target.has_head() and not target.guesses_masked() and generation:
        write_json(folder / GENERATION, generation)
    return tokenizer


def _files_of_run(folder: Path, target: ExportTarget, tokenizer: Path | None) -> dict[str, int]:
    """Writes the tokenizer's files of a run that began from no folder; returns the ids of special tokens."""
    config, end = target.model.config, target.model.config.data.end_token
    if config.masking is None:
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        return ids | ({} if tokenizer is None else write_tokenizer(tokenizer, folder, config))
    first, last = config.masking.cls_token, config.masking.sep_token
    ids = {"pad_token_id": 0, "bos_token_id": first, "cls_token_id": first}
    ids |= {"eos_token_id": last, "sep_token_id": last}
    ids |= {} if tokenizer is None else write_encoder_tokenizer(tokenizer, folder, config)
    return ids | ({"eos_token_id": end} if config.model.is_causal else {})


def _of_run(target: ExportTarget) -> dict[str, Any]:
    """config.json without special tokens."""
    model, config, head, family = target.model, target.model.config, target.head, target.family
    origin = {
        "run": config.name,
        "head": head.name,
        "objective": config.objective.model_dump(),
        "step": model.checkpoint.step,
        "tokens": model.checkpoint.state.get("tokens"),
    }
    return {
        **family.config(head.shape(config.model)),
        "architectures": [family.with_head if target.has_head() else family.backbone],
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": head.is_embedding(),
        "dtype": target.dtype,
        "megahead": origin,
    }


def _of_kept(target: ExportTarget, kept: KeptSettings) -> dict[str, Any]:
    """config.json as it was, with what the run changed."""
    before, now = kept.content(CONFIG), _of_run(target)
    if before["model_type"] != now["model_type"]:  # a class that has another head, or what a Mistral goes out as
        return now | {name: id_ for name, id_ in before.items() if name.endswith("_token_id")}
    then = target.family.config(ModelConfig(**target.family.settings(before)))
    changed = {name: value for name, value in now.items() if name not in then or then[name] != value}
    if not target.has_head() and "tie_word_embeddings" in before:
        del changed["tie_word_embeddings"]  # there is nothing to tie
    if "torch_dtype" in before:
        changed["torch_dtype"] = target.dtype
    return before | changed


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, for people too."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Exports a checkpoint as a Hugging Face folder, which appears only once its outputs equal the checkpoint's.

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
    `Qwen2ForCausalLM` or `Qwen3ForCausalLM`, and with a bias in its head the class of `megahead/hf/decoders.py`.

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


# Finds the Hugging Face folder for the model a user names: a folder, or a run or checkpoint to export.


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
    output = model.run_folder().exports / f"{model.checkpoint.folder.name}-{head}"
    lacks_tokenizer = model.tokenizer() is not None and not (output / "tokenizer.json").is_file()
    if lacks_tokenizer or _source(output) != fingerprint(model):
        export(model.checkpoint.folder, output, head)
    return output


@dataclass(frozen=True)
class Origin:
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


def _source(folder: Path) -> str | None:
    """Which checkpoint an export came from."""
    try:
        source: str = json.loads((folder / PARITY_FILE).read_text(encoding="utf-8"))["source"]
    except (OSError, ValueError, KeyError):
        return None
    return source
