"""How close synonyms lie in the embeddings of the other experiments' models (the paper's Fig. 9)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.laboratory import Laboratory
from megahead.data.tokenizer import load_tokenizer
from megahead.evaluate.geometry import similarities, synonym_pairs
from megahead.hf.published import input_embedding
from megahead.report.figures import save_similarities

MODELS = ("encoders/headless", "encoders/vanilla", "decoders/headless-0", "decoders/vanilla-0", "decoders/random-0")
WORDNET = Path("/usr/share/wordnet")


def compare_synonyms(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Compares the models of `encoders` and `decoders` that are there (or those of `only`, folders like theirs)."""
    pairs = synonym_pairs(WORDNET)
    found = {}
    for name in only or MODELS:
        run = laboratory.folder.parent / name
        if run.exists():
            weight_VD, tokenizer = input_embedding(run)
            found[name] = similarities(weight_VD, load_tokenizer(tokenizer), pairs)
    rows = []
    for name, cosines in found.items():
        means = {"synonyms": float(cosines.synonyms_P.mean()), "random pairs": float(cosines.random_P.mean())}
        error = float(cosines.synonyms_P.std() / len(cosines.synonyms_P) ** 0.5)
        rows.append({"model": name, "pairs": len(cosines.synonyms_P), **means, "gap": cosines.gap(), "± gap": error})
    laboratory.record("synonyms", rows)
    save_similarities(found, laboratory.folder / "synonyms.png")
