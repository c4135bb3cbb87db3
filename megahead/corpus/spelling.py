"""What tokens stand for, in bytes, however their tokenizer spells them, and which of them are special.

A space in front belongs to a token's bytes: byte-level BPE spells ` the` as `Ġthe`, SentencePiece as `▁the`, and
WordPiece as `the`, where what continues a word is `##the`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megahead.corpus.tokenizer import Tokenizer, load_tokenizer
from megahead.errors import DataError

ROLES = {
    "begin": ("[CLS]", "<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>"),
    "end": ("[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "padding": ("[PAD]", "<|padding|>", "<pad>", "<|finetune_right_pad_id|>"),
    "mask": ("[MASK]", "<mask>"),
    "unknown": ("[UNK]", "<unk>"),
}
"""What special tokens are for, and how they are spelled in published tokenizers."""

_SPACE = "▁"  # SentencePiece's
_IDEOGRAPHS = range(0x3400, 0xA000)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class SpelledVocabulary:
    """A tokenizer and what its tokens stand for."""

    tokenizer: Tokenizer
    spellings: list[str | None]
    """By id; None where there is no such id."""

    text: list[bytes | None]
    """By id; None for special tokens and where there is no such id."""

    @staticmethod
    def open(path: Path) -> SpelledVocabulary:
        """DataError for what is neither a `tokenizer.json` nor like one, or spells its tokens in another way than those
        above."""
        tokenizer = load_tokenizer(path)
        content = json.loads(tokenizer.content())
        spellings = tokenizer.spellings(tokenizer.vocab_size)
        special, added = _special(content), {token["content"] for token in content.get("added_tokens") or ()}
        undo = _speller(content, path)
        text = [
            None if one is None or one in special else one.encode() if one in added else undo(one) for one in spellings
        ]
        return SpelledVocabulary(tokenizer, spellings, text)

    @cached_property
    def special(self) -> dict[str, int]:
        """The ids of special tokens by their spellings."""
        return {name: id_ for id_, name in enumerate(self.spellings) if name is not None and self.text[id_] is None}

    def in_role(self, role: str) -> int | None:
        """The id of the special token with this role (a key of ROLES); None where there is none."""
        own = self.tokenizer.roles.get(role)
        return next((self.special[name] for name in ROLES[role] if name in self.special), None) if own is None else own

    def role_of(self, id_: int) -> str | None:
        """The role of a special token."""
        return next((role for role in ROLES if self.in_role(role) == id_ or self.spellings[id_] in ROLES[role]), None)


def bytes_of_ids(path: str, count: int) -> list[bytes | None]:
    """What each id below `count` stands for; None for special tokens and where there is no such id. DataError as of
    `SpelledVocabulary.open`."""
    text = SpelledVocabulary.open(load_tokenizer(path).path).text[:count]
    return text + [None] * (count - len(text))


def _special(content: dict[str, Any]) -> set[str]:
    """How special tokens are spelled, that for the unknown among them."""
    model = content["model"]
    found = {token["content"] for token in content.get("added_tokens") or () if token["special"]}
    if isinstance(model.get("unk_id"), int):
        found.add(model["vocab"][model["unk_id"]][0])
    return found | ({model["unk_token"]} if model.get("unk_token") else set())


def _speller(content: dict[str, Any], path: Path) -> Callable[[str], bytes]:
    """What turns this tokenizer's spelling of a token into its bytes."""
    model = content["model"]
    ways = {part: content.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")}
    kinds = {kind for way in ways.values() for kind in _kinds(way)}
    if "WordPiece" in kinds or model.get("type") == "WordPiece":
        return _of_wordpiece(model.get("continuing_subword_prefix") or "##")
    if "ByteLevel" in kinds:
        return _of_byte_level
    if _SPACE in json.dumps(ways, ensure_ascii=False):
        return _of_sentencepiece
    raise DataError(f"`{path}` must spell tokens as byte-level BPE, WordPiece or SentencePiece do, but does not.")


def _kinds(part: Any) -> Iterator[str]:
    """The types in a part of the file, also of what sequences are made of."""
    if isinstance(part, dict):
        yield part.get("type", "")
        for key in ("normalizers", "pretokenizers", "decoders"):
            for inner in part.get(key, ()):
                yield from _kinds(inner)


def _of_byte_level(spelled: str) -> bytes:
    known = _byte_of()
    return b"".join(bytes([known[char]]) if char in known else char.encode() for char in spelled)


def _of_sentencepiece(spelled: str) -> bytes:
    byte = _BYTE.fullmatch(spelled)
    return bytes([int(byte[1], 16)]) if byte else spelled.replace(_SPACE, " ").encode()


def _of_wordpiece(prefix: str) -> Callable[[str], bytes]:
    def undo(spelled: str) -> bytes:
        if spelled.startswith(prefix) and spelled != prefix:
            return spelled.removeprefix(prefix).encode()
        return (spelled if _stands_alone(spelled) else f" {spelled}").encode()

    return undo


def _stands_alone(spelled: str) -> bool:
    """Whether BERT makes a word of it without a space around: punctuation, and ideographs."""
    return len(spelled) == 1 and (unicodedata.category(spelled)[0] in "PS" or ord(spelled) in _IDEOGRAPHS)


@cache
def _byte_of() -> dict[str, int]:
    """The byte of each of the characters that GPT-2's byte-level BPE spells bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
