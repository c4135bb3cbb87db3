"""Trains a tokenizer on text files and writes it as one tokenizer.json; or adds the tokens that encoders need to one.

megahead train-tokenizer --input corpus.jsonl --vocab-size 16384 --type bpe --output tokenizer.json
megahead train-tokenizer --extend 20B_tokenizer.json --output encoder_tokenizer.json
"""

from __future__ import annotations

import argparse

from tokenizers import Tokenizer

from megahead.corpus import Bar, load_tokenizer
from megahead.corpus.selection import Selection
from megahead.corpus.vocabulary import TRAINERS, add_encoder_tokens, sample_texts, save_tokenizer


def main() -> None:
    arguments = parse()
    if arguments.extend is not None:
        made, kind = opened_tokenizer(arguments.extend), "extended"
    else:
        made, kind = trained(arguments), arguments.type
    if arguments.extend is not None or arguments.encoder:
        add_encoder_tokens(made)
    save_tokenizer(made, arguments.output)
    print(f"{arguments.output}: {kind} with {made.get_vocab_size()} ids")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--input", nargs="+", metavar="F", help="text to train on, as `megahead preprocess` takes it")
    work.add_argument("--extend", metavar="T", help="only add [CLS], [SEP] and [MASK] to this tokenizer.json")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="ids to train, special tokens included")
    parser.add_argument("--type", choices=TRAINERS, default="bpe")
    parser.add_argument("--encoder", action="store_true", help="add [CLS], [SEP] and [MASK] after the V ids")
    parser.add_argument("--output", required=True, metavar="T", help="tokenizer.json to write")
    parser.add_argument("--text-key", default="text", help="key of the text, `a.b` for nested ones (default: text)")
    parser.add_argument("--max-bytes", type=float, metavar="N", help="read only the first N bytes (1e8: 100 MB)")
    arguments = parser.parse_args()
    if arguments.input is not None and arguments.vocab_size is None:
        parser.error("--vocab-size is required with --input")
    return arguments


def trained(arguments: argparse.Namespace) -> Tokenizer:
    """A tokenizer of the type asked for, trained on the texts."""
    limit = None if arguments.max_bytes is None else int(arguments.max_bytes)
    with Bar("Reading") as bar:
        selection = Selection(arguments.text_key)
        texts = sample_texts(arguments.input, selection=selection, max_bytes=limit, progress=bar)
        return TRAINERS[arguments.type](texts, arguments.vocab_size)


def opened_tokenizer(path: str) -> Tokenizer:
    """The library's own tokenizer in `path`."""
    load_tokenizer(path)  # DataError if there is none
    return Tokenizer.from_file(path)
