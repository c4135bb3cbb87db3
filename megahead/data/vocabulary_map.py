"""Maps one vocabulary to another, by what tokens stand for."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megahead.data.tokenizer import Tokenizer, load_tokenizer
from megahead.errors import DataError

# What tokens stand for, in bytes, however their tokenizer spells them, and which of them are special. A space in front
# belongs to a token's bytes: byte-level BPE spells ` the` as `Ġthe`, SentencePiece as `▁the`, and WordPiece as `the`,
# where what continues a word is `##the`.

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
class ByteVocabulary:
    """A tokenizer and what its tokens stand for."""

    tokenizer: Tokenizer
    spellings: list[str | None]
    """By id; None where there is no such id."""

    token_bytes: list[bytes | None]
    """By id; None for special tokens and where there is no such id."""

    @staticmethod
    def open(path: Path) -> ByteVocabulary:
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
        return ByteVocabulary(tokenizer, spellings, text)

    @cached_property
    def by_bytes_and_spelling(self) -> dict[tuple[bytes, str], int]:
        """The ids that stand for text. SentencePiece may have a byte twice: as `A` and as a fallback, `<0x41>`."""
        both = zip(self.token_bytes, self.spellings, strict=True)
        return {(text, spelled): id_ for id_, (text, spelled) in enumerate(both) if text and spelled is not None}

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """The same without fallbacks for what has another spelling."""
        found: dict[bytes, int] = {}
        for (text, spelled), id_ in self.by_bytes_and_spelling.items():
            if text not in found or not spelled.startswith("<0x"):
                found[text] = id_
        return found

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest of them."""
        return max(map(len, self.by_bytes), default=0)

    @cached_property
    def special(self) -> dict[str, int]:
        """The ids of special tokens by their spellings."""
        return {
            name: id_ for id_, name in enumerate(self.spellings) if name is not None and self.token_bytes[id_] is None
        }

    def id_of_role(self, role: str) -> int | None:
        """The id of the special token with this role (a key of ROLES); None where there is none."""
        own = self.tokenizer.roles.get(role)
        return next((self.special[name] for name in ROLES[role] if name in self.special), None) if own is None else own

    def role_of(self, id_: int) -> str | None:
        """The role of a special token."""
        return next(
            (role for role in ROLES if self.id_of_role(role) == id_ or self.spellings[id_] in ROLES[role]), None
        )


def bytes_of_ids(path: str, count: int) -> list[bytes | None]:
    """What each id below `count` stands for; None for special tokens and where there is no such id. DataError as of
    `ByteVocabulary.open`."""
    text = ByteVocabulary.open(load_tokenizer(path).path).token_bytes[:count]
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
    ways = [content.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    written = json.dumps(ways, ensure_ascii=False)
    if '"WordPiece"' in written or model.get("type") == "WordPiece":
        return _of_wordpiece(model.get("continuing_subword_prefix") or "##")
    if '"ByteLevel"' in written:
        bytes_of = _bytes_of_characters()
        return lambda spelled: b"".join(bytes_of.get(char) or char.encode() for char in spelled)
    if _SPACE in written:
        return _of_sentencepiece
    raise DataError(f"`{path}` must spell tokens as byte-level BPE, WordPiece or SentencePiece do, but does not.")


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
def _bytes_of_characters() -> dict[str, bytes]:
    """What each of the characters stands for that GPT-2's byte-level BPE spells bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
    return {char: bytes([byte]) for char, byte in spelled.items()}


# Maps a new vocabulary to an old one: which tokens both have, and which old tokens make up each of the others. Special
# tokens are the same if they are spelled alike, or else have the same role. V ids of the new vocabulary.


@dataclass(frozen=True)
class VocabularyMap:
    """What each new id is in old ids."""

    old_size: int
    """How many ids the old vocabulary has."""

    old_id_V: list[int | None]
    """The old id of the same bytes, or of the same special token; None for tokens that are not kept."""

    old_pieces_V: list[list[int]]
    """For a token that is not kept, the old ids whose bytes make it up; empty where none do."""

    def counts(self) -> tuple[int, int, int]:
        """Tokens that are kept, made up of pieces, and neither."""
        kept = sum(id_ is not None for id_ in self.old_id_V)
        pieced = sum(bool(pieces) for pieces in self.old_pieces_V)
        return kept, pieced, len(self.old_id_V) - kept - pieced

    def with_appended_ids(self, old_ids: Sequence[int]) -> VocabularyMap:
        """With ids behind the new tokenizer's that stand for these behind the old one's."""
        more: list[list[int]] = [[] for _ in old_ids]
        return VocabularyMap(self.old_size + len(old_ids), [*self.old_id_V, *old_ids], [*self.old_pieces_V, *more])

    def is_permutation(self) -> bool:
        """Whether all tokens of both vocabularies are kept, each once."""
        return set(self.old_id_V) == {*range(self.old_size)} and len(self.old_id_V) == self.old_size


def map_vocabulary(old: ByteVocabulary, new: ByteVocabulary, roles: Mapping[str, int]) -> VocabularyMap:
    """What each token of `new` is in `old`; `roles`: old ids of special tokens by role (a key of ROLES), where the
    model's config names them."""
    kept = [_kept(id_, old, new, roles) for id_ in range(len(new.spellings))]
    wanted = [id_ for id_, text in enumerate(new.token_bytes) if text and kept[id_] is None]
    found = _pieces([new.token_bytes[id_] or b"" for id_ in wanted], old)
    pieces: list[list[int]] = [[] for _ in new.spellings]
    for id_, old_ids in zip(wanted, found, strict=True):
        pieces[id_] = old_ids
    return VocabularyMap(len(old.spellings), kept, pieces)


def _kept(id_: int, old: ByteVocabulary, new: ByteVocabulary, roles: Mapping[str, int]) -> int | None:
    """The old id of a new token: of the same bytes (in the same spelling, if two have them), or the same special
    token."""
    text, spelled = new.token_bytes[id_], new.spellings[id_]
    if spelled is None:
        return None
    if text is not None:
        return old.by_bytes_and_spelling.get((text, spelled), old.by_bytes.get(text))
    if spelled in old.special:
        return old.special[spelled]
    role = new.role_of(id_)
    return None if role is None else roles.get(role, old.id_of_role(role))


def _pieces(tokens: Sequence[bytes], old: ByteVocabulary) -> list[list[int]]:
    """The old ids that make up each token. They are what the old tokenizer encodes it as, if that is just its bytes;
    else the longest old tokens that match from left to right; else what the old tokenizer encodes it as after all
    (because it lower-cases, say), without unknown tokens."""
    found = []
    for token, ids in zip(tokens, old.tokenizer.encode_batch([_readable(token) for token in tokens]), strict=True):
        exact = b"".join(old.token_bytes[id_] or b"" for id_ in ids) == token
        own = [id_ for id_ in ids if old.token_bytes[id_] is not None]
        found.append(own if exact else _longest(token, old) or own)
    return found


def _readable(token: bytes) -> str:
    """Its text; empty where its bytes are not whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""


def _longest(token: bytes, old: ByteVocabulary) -> list[int]:
    """The longest old token at each position, from left to right; empty where one matches nowhere."""
    ids, at = [], 0
    while at < len(token):
        ends = range(min(len(token), at + old.longest), at, -1)
        end = next((end for end in ends if token[at:end] in old.by_bytes), None)
        if end is None:
            return []
        ids.append(old.by_bytes[token[at:end]])
        at = end
    return ids
