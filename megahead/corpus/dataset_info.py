"""`PREFIX.json`: counts, origin and checksums of a dataset, which can be read without reading its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from megahead.errors import DataError

FORMAT = "megahead-dataset/1"


@dataclass(frozen=True)
class FileFingerprint:
    """Size and checksum of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer cut a text."""

    name: str
    """Of its file."""

    sha256: str
    """Of its file."""

    vocabulary: str
    """SHA-256 of all that decides which ids a text becomes: equal for a file that was saved again in another form."""

    def __str__(self) -> str:
        return f"{self.name} ({self.sha256[:8]})"


def require_one_tokenizer(cut_by: Mapping[str, TokenizerIdentity | None]) -> None:
    """DataError unless all of these, by what they are, have one tokenizer; those of which none is known pass."""
    known = [(what, identity) for what, identity in cut_by.items() if identity is not None]
    for what, identity in known[1:]:
        first, its = known[0]
        if identity.vocabulary != its.vocabulary:
            raise DataError(
                f"{first} and {what} must have one tokenizer, but they have {its} and {identity} instead; name the "
                "tokenizer that the text was cut with, or cut it again."
            )


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Counts, origin and checksums of one `.bin` / `.idx` pair."""

    tokens: int
    """All tokens, end tokens included."""

    documents: int
    """Documents, each closed by an end token."""

    text_bytes: int
    """UTF-8 bytes of the text (bits per byte = nats / ln 2 / text_bytes); 0 when unknown."""

    vocab_size: int
    """Ids are below this."""

    tokenizer: str | None
    """Name of the tokenizer's file."""

    token_counts: list[int]
    """[vocab_size]: how often each id occurs."""

    bin: FileFingerprint
    idx: FileFingerprint

    tokenizer_sha256: str | None = None
    """Of the tokenizer's file; None in datasets of earlier versions, and where nobody named one."""

    vocabulary_sha256: str | None = None
    """`TokenizerIdentity.vocabulary`."""

    def identity(self) -> TokenizerIdentity | None:
        """Of the tokenizer, if it is known."""
        known = self.tokenizer, self.tokenizer_sha256, self.vocabulary_sha256
        return None if None in known else TokenizerIdentity(*map(str, known))

    def dump(self) -> bytes:
        """The JSON text."""
        return orjson.dumps({"format": FORMAT, **vars(self)})  # asdict would copy every count

    def _check(self) -> None:
        """ValueError for values of other types than above."""
        numbers = [self.tokens, self.documents, self.text_bytes, self.vocab_size, self.bin.bytes, self.idx.bytes]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError("a number is none")
        if not all(isinstance(fingerprint.sha256, str) for fingerprint in (self.bin, self.idx)):
            raise ValueError("a checksum is none")
        counts_V = np.asarray(self.token_counts)
        if counts_V.dtype.kind not in "iu" or counts_V.shape != (self.vocab_size,) or (counts_V < 0).any():
            raise ValueError("token_counts are not counts of vocab_size ids")

    @staticmethod
    def load(path: Path) -> DatasetInfo:
        """Reads `path`; DataError when it is not such a file."""
        try:
            fields = orjson.loads(path.read_bytes())
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            info = DatasetInfo(**fields | {name: FileFingerprint(**fields[name]) for name in ("bin", "idx")})
            info._check()
            return info
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"`{path}` must be a dataset description ({FORMAT}), but is not ({error}); remove it or make the "
                "dataset again."
            ) from error


def verify_file(path: Path, fingerprint: FileFingerprint, advance: Callable[[int], None] = lambda read: None) -> None:
    """Reads all of `path` and compares its checksum; DataError when it differs. `advance` is called with the number of
    bytes of each block read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            advance(len(block))
    if digest.hexdigest() != fingerprint.sha256:
        raise DataError(
            f"`{path}` must have the SHA-256 {fingerprint.sha256} recorded when it was made, but has "
            f"{digest.hexdigest()} instead; it was damaged or changed since."
        )
