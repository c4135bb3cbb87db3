"""The tokenizer of an export, as transformers (4 and 5) reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers.processors import TemplateProcessing

from megahead.config import RunConfig
from megahead.corpus import load_tokenizer
from megahead.corpus.sentencepiece_model import is_sentencepiece
from megahead.errors import DataError

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
