"""Trains a tokenizer on text files and writes it as one tokenizer.json.

tools/train_tokenizer.py --input corpus.jsonl --vocab-size 16384 --type bpe --output tokenizer.json
"""

from __future__ import annotations

import argparse

from megahead.data import Bar
from megahead.data.selection import Selection
from megahead.data.vocabulary import TRAINERS, sample_texts, save_tokenizer
from megahead.errors import run_command


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tokenizer on text files.")
    parser.add_argument("--input", nargs="+", required=True, metavar="F", help="as tools/preprocess.py takes them")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="V", help="ids, special tokens included")
    parser.add_argument("--type", choices=TRAINERS, default="bpe")
    parser.add_argument("--output", required=True, metavar="T", help="tokenizer.json to write")
    parser.add_argument("--text-key", default="text", help="key of the text in each JSON line (default: text)")
    parser.add_argument("--max-bytes", type=float, metavar="N", help="read only the first N bytes (1e8: 100 MB)")
    arguments = parser.parse_args()

    limit = None if arguments.max_bytes is None else int(arguments.max_bytes)
    with Bar("Reading") as bar:
        texts = sample_texts(arguments.input, selection=Selection(arguments.text_key), max_bytes=limit, progress=bar)
        tokenizer = TRAINERS[arguments.type](texts, arguments.vocab_size)
    save_tokenizer(tokenizer, arguments.output)
    print(f"{arguments.output}: {arguments.type} with {tokenizer.get_vocab_size()} ids")


if __name__ == "__main__":
    run_command(main)
