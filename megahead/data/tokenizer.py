"""One tokenizer interface over two engines: `fastokens` where it is exact, Hugging Face `tokenizers` elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import fastokens
import numpy as np
import tokenizers

from megahead.errors import DataError

Engine = Literal["fastokens", "tokenizers"]
Array = np.ndarray[Any, Any]


class Tokenizer:
    """A `tokenizer.json`. Encoding adds no special tokens and truncates nothing; their text is still recognised."""

    def __init__(self, path: str | Path, engine: Engine = "tokenizers") -> None:
        self.path = Path(path)
        self.engine: Engine = engine
        self._reference = _load_reference(self.path)
        self._fast = fastokens.Tokenizer.from_file(str(self.path)) if engine == "fastokens" else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        vocabulary = self._reference.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        """One above the largest id, added tokens included."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. Uses all cores the engine is given."""
        if self._fast is not None:
            ids, lengths = self.encode_flat(texts)
            return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []
        return [encoding.ids for encoding in self._reference.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_flat(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """(ids of all texts back to back, length of each), int64 or uint32: no Python object per token."""
        if self._fast is not None:
            ids, bounds = self._fast.encode_batch_flat(list(texts))
            return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(bounds, np.uint64).astype(np.int64))
        parts = self.encode_batch(texts)
        lengths = np.array([len(part) for part in parts], np.int64)
        return np.concatenate([np.empty(0, np.int64), *(np.asarray(part, np.int64) for part in parts)]), lengths

    def decode(self, ids: Sequence[int] | Array) -> str:
        """The text of `ids`, special tokens included."""
        return self._reference.decode([int(i) for i in ids], skip_special_tokens=False)

    def id_of(self, token: str) -> int:
        """The id of a token given by its spelling; DataError when the vocabulary lacks it."""
        found = self._reference.token_to_id(token)
        if found is None:
            raise DataError(f"the tokenizer `{self.path}` must have a token `{token}`, but has none; name another one.")
        return found


def load_tokenizer(path: str | Path, probe: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer in `path`: the fast engine when it gives the reference's ids on every text of `probe`.

    Without a probe, or when the fast engine cannot read the file (WordPiece, for one), the reference itself.
    DataError when the file is missing or is no `tokenizer.json`.
    """
    reference = Tokenizer(path)
    if not probe:
        return reference
    try:
        fast = Tokenizer(path, "fastokens")
        exact = fast.encode_batch(probe) == reference.encode_batch(probe)
    except ValueError:  # what fastokens raises for a kind of tokenizer it does not know
        exact = False
    return fast if exact else reference


def _load_reference(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise DataError(f"`{path}` must be a tokenizer.json file, but there is none; check the path.")
    try:
        reference = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"`{path}` must be a tokenizer.json file, but cannot be read as one: {error}.") from error
    reference.no_truncation()
    reference.no_padding()
    return reference
