"""Writes each id's nearest ids in a model's input embedding, for masking with similar words and for hard negatives.

megahead nearest-ids --model runs/headless --output data/nearest.npy    # then data.nearest_ids: data/nearest.npy
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megahead.checkpoints.arguments import existing_or_fetched
from megahead.data.tokenizer import load_tokenizer
from megahead.errors import FieldError
from megahead.terminal import terminal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=existing_or_fetched, required=True, metavar="DIR", help="HF folder, run or checkpoint")
    add("--each", type=int, default=8, metavar="K", help="nearest ids of each id (default: 8)")
    add("--output", type=Path, required=True, metavar="NPY", help="the file to write")
    arguments = parser.parse_args()
    if arguments.each < 1:
        raise FieldError("--each", "be at least 1", got=arguments.each)
    from megahead.data.loader import find_nearest_ids, save_nearest_ids
    from megahead.hf.published import input_embedding

    weight_VD, tokenizer = input_embedding(arguments.model)
    known = weight_VD[: load_tokenizer(tokenizer).vocab_size]  # what lies behind is padding
    nearest_VK = find_nearest_ids(known.numpy(), arguments.each)
    save_nearest_ids(arguments.output, nearest_VK)
    terminal().print(f"wrote {arguments.output}: {arguments.each} for each of {len(nearest_VK):,} ids")
