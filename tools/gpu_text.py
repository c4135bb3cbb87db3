"""Tokenizes a text into a dataset small enough to be carried to a GPU machine with the checkout.

tools/gpu_text.py --text a.jsonl.zst --tokenizer 20B_tokenizer.json [--output build/gpu-text] [--mebibytes 40]

The first documents of the text, 2 bytes a token (40 MiB are 21 M tokens; longer trainings read them again), every
200th kept for validation. `tools/gpu_report.py --dataset build/gpu-text/text` trains on it, without a tokenizer.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import preprocess
from megahead.data.tokenizer import load_tokenizer
from megahead.data.writer import Bar, IndexedDatasetWriter
from megahead.errors import FieldError, existing, run_command

HOLDOUT = 200
MOST_IDS = 50277  # of the models that the report trains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=existing, nargs="+", required=True, metavar="F", help="as of preprocess.py")
    parser.add_argument("--tokenizer", type=existing, required=True, metavar="JSON", help="of at most 50,277 ids")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-text"), help="default: build/gpu-text")
    parser.add_argument("--mebibytes", type=float, default=40, help="at most (default: 40)")
    arguments = parser.parse_args()
    size = load_tokenizer(str(arguments.tokenizer)).vocab_size
    if size > MOST_IDS:
        raise FieldError("--tokenizer", f"have at most {MOST_IDS:,} ids", got=size)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        with Bar("Tokenizing") as bar:
            preprocess(arguments.text, arguments.tokenizer, whole, workers=os.cpu_count() or 1, progress=bar)
        print(cut(IndexedDataset(whole), arguments.output, int(arguments.mebibytes * 2**19)))


def cut(dataset: IndexedDataset, folder: Path, most: int) -> str:
    """Writes the first documents, of `most` tokens together at most, to `folder`; a line about them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = 0
    with ExitStack() as stack:
        text, held_out = (
            stack.enter_context(IndexedDatasetWriter(folder / name, vocab_size=MOST_IDS))
            for name in ("text", "text-validation")
        )
        for number in range(dataset.num_documents):
            document = dataset.document(number)
            if tokens + len(document) > most:
                break
            (held_out if number % HOLDOUT == HOLDOUT - 1 else text).add_document(document)
            tokens += len(document)
    return f"{folder}/text: {tokens:,} tokens, {2 * tokens / 2**20:.1f} MiB"


if __name__ == "__main__":
    run_command(main)
