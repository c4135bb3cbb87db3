"""Compares the similarity of WordNet's synonyms in models' input embeddings: Hugging Face folders, runs, checkpoints.

megahead synonyms --model runs/headless runs/vanilla --output synonyms.png
"""
# Shape suffixes: V ids, D dimensions, P pairs of words.

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megahead.commands import checkpoint_path
from megahead.data.tokenizer import load_tokenizer
from megahead.report.tables import terminal, to_rich

if TYPE_CHECKING:
    from megahead.evaluate.geometry import Similarities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=checkpoint_path, nargs="+", required=True, metavar="DIR", help="HF folder, run, checkpoint")
    files = "folder of WordNet's data.* files (default: /usr/share/wordnet, Debian's wordnet-base)"
    add("--wordnet", type=Path, default="/usr/share/wordnet", metavar="DIR", help=files)
    add("--output", type=Path, metavar="PNG", help="also draw the distributions there")
    arguments = parser.parse_args()
    from megahead.evaluate.geometry import similarities, synonym_pairs
    from megahead.hf.importing import load_input_embedding

    pairs = synonym_pairs(arguments.wordnet)
    results: dict[str, Similarities] = {}
    rows = []
    for model in dict.fromkeys(arguments.model):
        weight_VD, tokenizer = load_input_embedding(model)
        result = results[str(model)] = similarities(weight_VD, load_tokenizer(tokenizer), pairs)
        synonyms, random = (  # means with their standard errors
            f"{cosines_P.mean():.4f} ± {cosines_P.std() / len(cosines_P) ** 0.5:.4f}"
            for cosines_P in (result.synonyms_P, result.random_P)
        )
        row = {"model": str(model), "pairs": len(result.synonyms_P), "synonyms": synonyms, "random": random}
        rows.append(row | {"gap": f"{result.gap():+.4f}"})
    console = terminal()
    console.print(to_rich(rows, right=["synonyms", "random", "gap"]))
    if arguments.output:
        from megahead.report.figures import draw_similarities, save_figure

        console.print(f"wrote {save_figure(draw_similarities(results), arguments.output)}", soft_wrap=True)
