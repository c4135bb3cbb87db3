"""One vocabulary's tokens in another's: which both have, and which pieces say the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megahead.corpus.spelling import ROLES, SpelledVocabulary


@dataclass(frozen=True)
class Translation:
    """By new id, what it is in old ids."""

    old_ids: int
    kept_V: list[int | None]
    """The old id of the same bytes, or of the same special role; None where there is none."""

    pieces_V: list[list[int]]
    """Old ids that together say a token that is not kept; none where it cannot be said."""

    def counts(self) -> tuple[int, int, int]:
        """Tokens kept, said by pieces, and new."""
        kept = sum(id_ is not None for id_ in self.kept_V)
        pieced = sum(bool(pieces) for pieces in self.pieces_V)
        return kept, pieced, len(self.kept_V) - kept - pieced

    def only_renumbers(self) -> bool:
        """Whether all tokens of both vocabularies are kept, each once."""
        return set(self.kept_V) == {*range(self.old_ids)} and len(self.kept_V) == self.old_ids


def translate(old: SpelledVocabulary, new: SpelledVocabulary, roles: Mapping[str, int]) -> Translation:
    """What each token of `new` is in `old`; `roles`: old ids of special roles that the model itself names."""
    known = _Known.of(old)
    kept = [_kept(id_, old, new, known, roles) for id_ in range(len(new.spellings))]
    wanted = [id_ for id_, text in enumerate(new.text) if text and kept[id_] is None]
    said = _pieces([new.text[id_] or b"" for id_ in wanted], old, known)
    pieces: list[list[int]] = [[] for _ in new.spellings]
    for id_, found in zip(wanted, said, strict=True):
        pieces[id_] = found
    return Translation(len(old.spellings), kept, pieces)


@dataclass(frozen=True)
class _Known:
    """The old ids of what stands for text."""

    by_bytes: dict[bytes, int]
    by_both: dict[tuple[bytes, str], int]
    """By bytes and spelling: SentencePiece may have a byte twice, as itself and to fall back on."""

    longest: int

    @staticmethod
    def of(vocabulary: SpelledVocabulary) -> _Known:
        by_bytes: dict[bytes, int] = {}
        by_both: dict[tuple[bytes, str], int] = {}
        for id_, (text, spelled) in enumerate(zip(vocabulary.text, vocabulary.spellings, strict=True)):
            if text and spelled is not None:
                by_both[text, spelled] = id_
                if text not in by_bytes or not spelled.startswith("<0x"):
                    by_bytes[text] = id_
        return _Known(by_bytes, by_both, max(map(len, by_bytes), default=0))


def _kept(
    id_: int, old: SpelledVocabulary, new: SpelledVocabulary, known: _Known, roles: Mapping[str, int]
) -> int | None:
    text, spelled = new.text[id_], new.spellings[id_]
    if spelled is None:
        return None
    if text is not None:
        return known.by_both.get((text, spelled), known.by_bytes.get(text))
    if spelled in old.special:
        return old.special[spelled]
    role = next((role for role, names in ROLES.items() if spelled in names), None)
    return None if role is None else roles.get(role, old.in_role(role))


def _pieces(tokens: Sequence[bytes], old: SpelledVocabulary, known: _Known) -> list[list[int]]:
    """Old ids of each token: the old tokenizer's own where they have just its bytes, else the longest that fit from
    left to right, else what the tokenizer makes of it (in lower case, say) but for unknown tokens."""
    found = []
    for token, ids in zip(tokens, old.tokenizer.encode_batch([_readable(token) for token in tokens]), strict=True):
        exact = b"".join(old.text[id_] or b"" for id_ in ids) == token
        own = [id_ for id_ in ids if old.text[id_] is not None]
        found.append(own if exact else _longest(token, known) or own)
    return found


def _readable(token: bytes) -> str:
    """Its text; none where it is not made of whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""


def _longest(token: bytes, known: _Known) -> list[int]:
    """The longest known piece at each place, from left to right; none where a byte is in no piece."""
    ids, at = [], 0
    while at < len(token):
        ends = range(min(len(token), at + known.longest), at, -1)
        end = next((end for end in ends if token[at:end] in known.by_bytes), None)
        if end is None:
            return []
        ids.append(known.by_bytes[token[at:end]])
        at = end
    return ids
