"""Small vocabularies of each kind, trained on little text."""

from __future__ import annotations

from pathlib import Path

from megahead.data.train_tokenizer import TRAINERS, save_tokenizer
from megahead.data.vocabulary_map import ByteVocabulary

_NOUNS, _VERBS = ("cat", "dog", "rat", "bird", "mat", "sea", "tree"), ("saw", "met", "heard", "liked", "carried")
TEXT = [f"the {a} {verb} the {b}, and so the naïve {b} was 猫; then" for a in _NOUNS for b in _NOUNS for verb in _VERBS]
GERMAN = [
    f"ein hund und eine {a} {verb} the {b}, naïve" for a in _NOUNS for b in _NOUNS for verb in ("sahen", "hörten")
]


def vocabulary(folder: Path, kind: str, size: int = 400, texts: list[str] = TEXT) -> ByteVocabulary:
    """Saved as FOLDER/KIND-SIZE.json."""
    path = folder / f"{kind}-{size}.json"
    save_tokenizer(TRAINERS[kind](texts, size), path)
    return ByteVocabulary.open(path)
