"""Maps a new vocabulary to an old one: which tokens both have, and which old tokens make up each of the others.

A token is *spelled* as in its tokenizer.json (` the` as `Ġthe`, say); its *text* is the bytes that it stands for, None
for special tokens. Ids without a token, such as padding, have no spelling either. Some special tokens have a *role*:
begin, end, padding, mask or unknown. They are the same if they are spelled alike, or else have the same role.

V ids of the new vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megahead.corpus.spelling import SpelledVocabulary


@dataclass(frozen=True)
class Translation:
    """What each new id is in old ids."""

    old_size: int
    """How many ids the old vocabulary has."""

    kept_V: list[int | None]
    """The old id of the same bytes, or of the same special token; None for tokens that are not kept."""

    pieces_V: list[list[int]]
    """For a token that is not kept, the old ids whose bytes make it up; empty where none do."""

    def counts(self) -> tuple[int, int, int]:
        """Tokens that are kept, made up of pieces, and neither."""
        kept = sum(id_ is not None for id_ in self.kept_V)
        pieced = sum(bool(pieces) for pieces in self.pieces_V)
        return kept, pieced, len(self.kept_V) - kept - pieced

    def followed_by(self, old_ids: Sequence[int]) -> Translation:
        """With ids behind the new tokenizer's that stand for these behind the old one's."""
        more: list[list[int]] = [[] for _ in old_ids]
        return Translation(self.old_size + len(old_ids), [*self.kept_V, *old_ids], [*self.pieces_V, *more])

    def only_renumbers(self) -> bool:
        """Whether all tokens of both vocabularies are kept, each once."""
        return set(self.kept_V) == {*range(self.old_size)} and len(self.kept_V) == self.old_size


def translate(old: SpelledVocabulary, new: SpelledVocabulary, roles: Mapping[str, int]) -> Translation:
    """What each token of `new` is in `old`; `roles`: old ids of special tokens by role (a key of ROLES), where the
    model's config names them."""
    known = _Known.of(old)
    kept = [_kept(id_, old, new, known, roles) for id_ in range(len(new.spellings))]
    wanted = [id_ for id_, text in enumerate(new.text) if text and kept[id_] is None]
    found = _pieces([new.text[id_] or b"" for id_ in wanted], old, known)
    pieces: list[list[int]] = [[] for _ in new.spellings]
    for id_, old_ids in zip(wanted, found, strict=True):
        pieces[id_] = old_ids
    return Translation(len(old.spellings), kept, pieces)


@dataclass(frozen=True)
class _Known:
    """Old tokens that stand for text, by their bytes."""

    by_bytes: dict[bytes, int]
    by_bytes_and_spelling: dict[tuple[bytes, str], int]
    """SentencePiece may have a byte twice: as a character and as a fallback, `<0x41>`."""

    longest: int
    """Bytes of the longest."""

    @staticmethod
    def of(vocabulary: SpelledVocabulary) -> _Known:
        by_bytes: dict[bytes, int] = {}
        by_bytes_and_spelling: dict[tuple[bytes, str], int] = {}
        for id_, (text, spelled) in enumerate(zip(vocabulary.text, vocabulary.spellings, strict=True)):
            if text and spelled is not None:
                by_bytes_and_spelling[text, spelled] = id_
                if text not in by_bytes or not spelled.startswith("<0x"):
                    by_bytes[text] = id_
        return _Known(by_bytes, by_bytes_and_spelling, max(map(len, by_bytes), default=0))


def _kept(
    id_: int, old: SpelledVocabulary, new: SpelledVocabulary, known: _Known, roles: Mapping[str, int]
) -> int | None:
    """The old id of a new token: of the same bytes (in the same spelling, if two have them), or the same special
    token."""
    text, spelled = new.text[id_], new.spellings[id_]
    if spelled is None:
        return None
    if text is not None:
        return known.by_bytes_and_spelling.get((text, spelled), known.by_bytes.get(text))
    if spelled in old.special:
        return old.special[spelled]
    role = new.role_of(id_)
    return None if role is None else roles.get(role, old.in_role(role))


def _pieces(tokens: Sequence[bytes], old: SpelledVocabulary, known: _Known) -> list[list[int]]:
    """The old ids that make up each token. They are what the old tokenizer encodes it as, if that is just its bytes;
    else the longest old tokens that match from left to right; else what the old tokenizer encodes it as after all
    (because it lower-cases, say), without unknown tokens."""
    found = []
    for token, ids in zip(tokens, old.tokenizer.encode_batch([_readable(token) for token in tokens]), strict=True):
        exact = b"".join(old.text[id_] or b"" for id_ in ids) == token
        own = [id_ for id_ in ids if old.text[id_] is not None]
        found.append(own if exact else _longest(token, known) or own)
    return found


def _readable(token: bytes) -> str:
    """Its text; empty where its bytes are not whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""


def _longest(token: bytes, known: _Known) -> list[int]:
    """The longest old token at each position, from left to right; empty where one matches nowhere."""
    ids, at = [], 0
    while at < len(token):
        ends = range(min(len(token), at + known.longest), at, -1)
        end = next((end for end in ends if token[at:end] in known.by_bytes), None)
        if end is None:
            return []
        ids.append(known.by_bytes[token[at:end]])
        at = end
    return ids
