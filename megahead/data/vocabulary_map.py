"""Maps one vocabulary to another by the bytes of their tokens."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megahead.data.tokenizer import Tokenizer, load_tokenizer
from megahead.errors import DataError

# The bytes of tokens, however their tokenizer spells them, and the special tokens. A leading space belongs to a token's
# bytes: byte-level BPE spells ` the` as `Ġthe`, SentencePiece as `▁the`, and WordPiece as `the`, which continues a word
# as `##the`.

ROLES = {
    "begin": ("[CLS]", "<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>"),
    "end": ("[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "padding": ("[PAD]", "<|padding|>", "<pad>", "<|finetune_right_pad_id|>"),
    "mask": ("[MASK]", "<mask>"),
    "unknown": ("[UNK]", "<unk>"),
}
"""Roles of special tokens, and their spellings in published tokenizers."""

_SPACE = "▁"  # SentencePiece's
_IDEOGRAPHS = range(0x3400, 0xA000)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class ByteVocabulary:
    """A tokenizer and the bytes of its tokens."""

    tokenizer: Tokenizer
    spellings: list[str | None]
    """By id; None for unused ids."""

    token_bytes: list[bytes | None]
    """By id; None for special tokens and unused ids."""

    @staticmethod
    def open(path: Path) -> ByteVocabulary:
        """Reads a tokenizer; DataError for one that is none of byte-level BPE, SentencePiece and WordPiece."""
        tokenizer = load_tokenizer(path)
        content = json.loads(tokenizer.content())
        spellings = tokenizer.spellings(tokenizer.vocab_size)
        model, added_tokens = content["model"], content.get("added_tokens") or ()
        added = {token["content"] for token in added_tokens}
        special = {token["content"] for token in added_tokens if token["special"]}
        if isinstance(model.get("unk_id"), int):
            special.add(model["vocab"][model["unk_id"]][0])
        if model.get("unk_token"):
            special.add(model["unk_token"])
        to_bytes = _spelling_decoder(content, path, added)
        text = [None if name is None or name in special else to_bytes(name) for name in spellings]
        return ByteVocabulary(tokenizer, spellings, text)

    @cached_property
    def id_by_bytes_and_spelling(self) -> dict[tuple[bytes, str], int]:
        """The ids of all but special tokens. SentencePiece may have a byte twice: as `A` and as a fallback,
        `<0x41>`."""
        pairs = zip(self.token_bytes, self.spellings, strict=True)
        return {(text, spelled): id_ for id_, (text, spelled) in enumerate(pairs) if text and spelled is not None}

    @cached_property
    def id_by_bytes(self) -> dict[bytes, int]:
        """As `id_by_bytes_and_spelling`, by bytes alone: a byte fallback only where no other token has its byte."""
        ids: dict[bytes, int] = {}
        for (text, spelled), id_ in self.id_by_bytes_and_spelling.items():
            if text not in ids or not spelled.startswith("<0x"):
                ids[text] = id_
        return ids

    @cached_property
    def max_bytes(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.id_by_bytes), default=0)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of special tokens by their spellings."""
        return {
            name: id_ for id_, name in enumerate(self.spellings) if name is not None and self.token_bytes[id_] is None
        }

    def id_of_role(self, role: str) -> int | None:
        """The id of the special token with this role (a key of ROLES); None if there is none."""
        if role in self.tokenizer.special_ids:
            return self.tokenizer.special_ids[role]
        return next((self.special_ids[name] for name in ROLES[role] if name in self.special_ids), None)


def bytes_of_ids(path: str, count: int) -> list[bytes | None]:
    """The bytes of each id below `count`; None for special tokens and unused ids. DataError as in
    `ByteVocabulary.open`."""
    text = ByteVocabulary.open(load_tokenizer(path).path).token_bytes[:count]
    return text + [None] * (count - len(text))


def _spelling_decoder(content: dict[str, Any], path: Path, added: Container[str]) -> Callable[[str], bytes]:
    """A function from this tokenizer's spelling of a token to its bytes. Tokens in `added` are text as it stands, but
    words in WordPiece."""
    model = content["model"]
    parts = [content.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    pipeline = json.dumps(parts, ensure_ascii=False)
    if '"WordPiece"' in pipeline or model.get("type") == "WordPiece":
        return _wordpiece_decoder(model.get("continuing_subword_prefix") or "##")
    if '"ByteLevel"' in pipeline:
        decode = _decode_byte_level
    elif _SPACE in pipeline:
        decode = _decode_sentencepiece
    else:
        raise DataError(f"`{path}` must spell tokens as byte-level BPE, WordPiece or SentencePiece do, but does not.")
    return lambda spelled: spelled.encode() if spelled in added else decode(spelled)


def _decode_byte_level(spelled: str) -> bytes:
    byte_by_character = _byte_by_character()
    return b"".join(byte_by_character.get(char) or char.encode() for char in spelled)


def _decode_sentencepiece(spelled: str) -> bytes:
    byte = _BYTE.fullmatch(spelled)
    return bytes([int(byte[1], 16)]) if byte else spelled.replace(_SPACE, " ").encode()


def _wordpiece_decoder(prefix: str) -> Callable[[str], bytes]:
    def decode(spelled: str) -> bytes:
        if spelled.startswith(prefix) and spelled != prefix:
            return spelled.removeprefix(prefix).encode()
        # punctuation and ideographs are words without spaces around them in BERT
        is_sign = len(spelled) == 1 and (unicodedata.category(spelled)[0] in "PS" or ord(spelled) in _IDEOGRAPHS)
        return (spelled if is_sign else f" {spelled}").encode()

    return decode


@cache
def _byte_by_character() -> dict[str, bytes]:
    """The bytes by the characters with which GPT-2's byte-level BPE spells them."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return {char: bytes([byte]) for char, byte in spelled.items()}


# Maps a new vocabulary to an old one: the tokens that both have, and the old tokens that make up each of the others.
# Special tokens are the same if they are spelled alike, or else have the same role. V ids of the new vocabulary.


@dataclass(frozen=True)
class VocabularyMap:
    """The old ids for each new id."""

    old_size: int
    """Number of ids of the old vocabulary."""

    old_ids: list[int | None]
    """The old id with the same bytes, or of the same special token; None if there is none."""

    old_pieces: list[list[int]]
    """For a token without an old id, the old ids whose bytes make it up; empty if none do."""

    def counts(self) -> tuple[int, int, int]:
        """Number of tokens with an old id, made up of old ids, and neither."""
        same = sum(id_ is not None for id_ in self.old_ids)
        pieced = sum(bool(pieces) for pieces in self.old_pieces)
        return same, pieced, len(self.old_ids) - same - pieced

    def with_appended_ids(self, appended_ids: Sequence[int]) -> VocabularyMap:
        """Appends a new id for each of `appended_ids`. Old and new lie above their tokenizers' ids."""
        old_pieces = self.old_pieces + [list[int]() for _ in appended_ids]
        return VocabularyMap(self.old_size + len(appended_ids), [*self.old_ids, *appended_ids], old_pieces)

    def is_permutation(self) -> bool:
        """Whether new and old ids correspond one to one."""
        return set(self.old_ids) == {*range(self.old_size)} and len(self.old_ids) == self.old_size


def map_vocabulary(old: ByteVocabulary, new: ByteVocabulary, roles: Mapping[str, int]) -> VocabularyMap:
    """Maps `new` to `old`. `roles`: old ids of special tokens by role (a key of ROLES), where the model's config has
    them."""
    same_ids = [_find_old_id(id_, old, new, roles) for id_ in range(len(new.spellings))]
    other_ids = [id_ for id_, text in enumerate(new.token_bytes) if text and same_ids[id_] is None]
    other_pieces = _split_into_old_ids([new.token_bytes[id_] or b"" for id_ in other_ids], old)
    pieces_by_id = dict(zip(other_ids, other_pieces, strict=True))
    pieces = [pieces_by_id.get(id_, []) for id_ in range(len(new.spellings))]
    return VocabularyMap(len(old.spellings), same_ids, pieces)


def _find_old_id(id_: int, old: ByteVocabulary, new: ByteVocabulary, roles: Mapping[str, int]) -> int | None:
    """The old id of a new token: with the same bytes (in the same spelling, if two have them), or of the same special
    token."""
    text, spelled = new.token_bytes[id_], new.spellings[id_]
    if spelled is None:
        return None
    if text is not None:
        return old.id_by_bytes_and_spelling.get((text, spelled), old.id_by_bytes.get(text))
    if spelled in old.special_ids:
        return old.special_ids[spelled]
    role = next((role for role in ROLES if new.id_of_role(role) == id_ or spelled in ROLES[role]), None)
    return None if role is None else roles.get(role, old.id_of_role(role))


def _split_into_old_ids(tokens: Sequence[bytes], old: ByteVocabulary) -> list[list[int]]:
    """The old ids that make up each token. They are the old tokenizer's ids for its text, if these have its bytes; else
    the longest old tokens that match its bytes from left to right; else the old tokenizer's ids without unknown tokens
    (as of a tokenizer that lower-cases)."""
    pieces = []
    for token, ids in zip(tokens, old.tokenizer.encode_batch(list(map(_decode_or_empty, tokens))), strict=True):
        is_exact = b"".join(old.token_bytes[id_] or b"" for id_ in ids) == token
        text_ids = [id_ for id_ in ids if old.token_bytes[id_] is not None]
        pieces.append(text_ids if is_exact else _longest_matches(token, old) or text_ids)
    return pieces


def _decode_or_empty(token: bytes) -> str:
    """The token's text; empty if bytes are not whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""


def _longest_matches(token: bytes, old: ByteVocabulary) -> list[int]:
    """The longest old token at each position, from left to right; empty if a position has none."""
    ids, start = [], 0
    while start < len(token):
        ends = range(min(len(token), start + old.max_bytes), start, -1)
        end = next((end for end in ends if token[start:end] in old.id_by_bytes), None)
        if end is None:
            return []
        ids.append(old.id_by_bytes[token[start:end]])
        start = end
    return ids
