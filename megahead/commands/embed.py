"""Writes an encoder's embeddings of texts as .npy: a row for each text, normalized, so that products are cosines.

megahead embed --model exports/retromae --input documents.jsonl --output documents.npy
megahead embed --model runs/retromae --pooling cls --input queries.txt --output queries.npy

Texts are the lines of .txt files, and the documents that `megahead preprocess` reads in other files.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megahead.commands import checkpoint_path
from megahead.data.records import LineSelection
from megahead.data.sources import find_inputs
from megahead.data.writer import ProgressBar
from megahead.errors import FieldError, existing_path, require_at_least
from megahead.hf.other_programs import POOLINGS
from megahead.wording import format_duration, pluralize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    model = "encoder: Hugging Face folder, run, checkpoint"
    add("--model", type=checkpoint_path, required=True, metavar="DIR", help=model)
    add("--input", type=existing_path, required=True, metavar="FILE", help="texts: .txt, .jsonl, .parquet, a folder")
    add("--output", type=Path, required=True, metavar="FILE", help="vectors.npy: float32, a row for each text")
    pooling = "[CLS] or the mean over tokens (default: what a folder of sentence-transformers names)"
    add("--pooling", choices=POOLINGS, help=pooling)
    key = "key of the text (default: text); of several, the first with text"
    add("--text-key", nargs="+", default=["text"], metavar="KEY", help=key)
    add("--batch-size", type=int, metavar="N", help="texts at once (default: 16,384 tokens)")
    arguments = parser.parse_args()
    require_at_least(1, batch_size=arguments.batch_size)
    if arguments.output.is_dir():
        raise FieldError("--output", "name a file", got=f"the folder {arguments.output}")
    print(embed(arguments))


def embed(arguments: argparse.Namespace) -> str:
    """Writes the vectors; returns a description."""
    started, selection = time.monotonic(), LineSelection(tuple(arguments.text_key))
    inputs = find_inputs(arguments.input)
    from megahead.evaluate.retrieval import count_texts, write_text_vectors

    with ProgressBar("Reading") as bar:
        num_texts = count_texts(inputs, selection, bar)
    with ProgressBar("Embedding") as bar:
        encoder, pooling = write_text_vectors(
            arguments.model,
            inputs,
            selection,
            arguments.output,
            num_texts,
            pooling=arguments.pooling,
            batch_size=arguments.batch_size,
            progress=bar,
        )
    vectors = pluralize(num_texts, "vector")
    line = f"wrote {arguments.output}: {vectors} of {encoder.size} features ({pooling}, length 1)"
    line += f" in {format_duration(time.monotonic() - started)}"
    if encoder.num_truncated:
        line += f"; {pluralize(encoder.num_truncated, 'text')} of more than {encoder.max_tokens} tokens truncated"
    return line
