"""Small SentencePiece models as people train them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece

KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
    },
    "nmt_nfkc": {"model_type": "unigram", "pad_id": 3},
    "no end": {"model_type": "unigram", "bos_id": -1, "eos_id": -1},
}
"""Settings beside the defaults: of Llama 2, of T5 and its like, and of one without tokens to begin and to end with."""


def sentencepiece_model(path: Path, texts: Iterable[str], size: int = 400, **settings: Any) -> Path:
    """Trained on `texts`, as `path`."""
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for text in texts for line in text.split("\n") if line.strip()]),
            model_writer=file,
            vocab_size=size,
            hard_vocab_limit=False,
            minloglevel=2,
            **settings,
        )
    return path
