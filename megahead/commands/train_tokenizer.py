"""Trains a tokenizer on text files and writes it as tokenizer.json; or extends one with tokens that a text needs.

megahead train-tokenizer --input corpus.jsonl --vocab-size 16384 --type bpe --output tokenizer.json
megahead train-tokenizer --extend 20B_tokenizer.json --output encoder_tokenizer.json
megahead train-tokenizer --extend 20B_tokenizer.json --input hindi.jsonl --vocab-size 65536 --output tokenizer.json

--extend alone adds [CLS], [SEP] and [MASK]. With --input it adds tokens to byte-level BPE, up to V ids: the most
frequent merges of existing tokens in the text. Old ids stay; `megahead convert revocabulary` then gives a model rows
for the new ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer

from megahead.data.records import Selection, parse_conditions
from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import TRAINERS, add_encoder_tokens, extend, sample_texts, save_tokenizer
from megahead.data.writer import ProgressBar
from megahead.errors import FieldError, require_at_least
from megahead.remote_files import local_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", metavar="F", help="text to train on, as `megahead preprocess` takes it")
    parser.add_argument("--extend", metavar="T", help="add to this tokenizer.json instead of training a new one")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="ids to have, special tokens included")
    parser.add_argument("--type", choices=TRAINERS, help="of a new tokenizer (default: bpe)")
    parser.add_argument("--encoder", action="store_true", help="add [CLS], [SEP] and [MASK] after the V ids")
    parser.add_argument("--output", required=True, metavar="T", help="tokenizer.json to write")
    parser.add_argument("--text-key", default="text", help="key of the text, `a.b` for nested ones (default: text)")
    parser.add_argument("--max-bytes", type=float, metavar="N", help="read only the first N bytes (1e8: 100 MB)")
    keep = "read only records that have one of the VALUEs given for each KEY (lang=hi)"
    parser.add_argument("--keep", nargs="+", default=[], metavar="KEY=VALUE", help=keep)
    arguments = parser.parse_args()
    if arguments.input is None and arguments.extend is None:
        parser.error("one of --input and --extend is required")
    if arguments.input is not None and arguments.vocab_size is None:
        parser.error("--vocab-size is required with --input")
    if arguments.extend is not None and arguments.type is not None:
        parser.error("--type is the extended tokenizer's own; leave it out")
    for name in ("vocab_size", "max_bytes", "keep"):
        if arguments.input is None and getattr(arguments, name):
            parser.error(f"--{name.replace('_', '-')} needs --input")
    if Path(arguments.output).is_dir():
        raise FieldError("--output", "name a file", got=f"the folder {Path(arguments.output)}")
    tokenizer_type = (arguments.type or "bpe") if arguments.extend is None else "extended"
    tokenizer = open_tokenizer(arguments.extend) if arguments.input is None else train(arguments)
    if arguments.input is None or arguments.encoder:
        add_encoder_tokens(tokenizer)
    save_tokenizer(tokenizer, arguments.output)
    print(f"{arguments.output}: {tokenizer_type} with {tokenizer.get_vocab_size()} ids")


def train(arguments: argparse.Namespace) -> Tokenizer:
    """Trains a new tokenizer of the chosen type, or extends an existing one."""
    if Path(arguments.output).resolve() in {Path(pattern).resolve() for pattern in arguments.input}:
        raise FieldError("--output", "be another file than --input", got=arguments.output)
    require_at_least(1, max_bytes=arguments.max_bytes)
    with ProgressBar("Reading") as bar:
        selection = Selection(arguments.text_key, parse_conditions("--keep", arguments.keep))
        texts = sample_texts(arguments.input, selection=selection, max_bytes=arguments.max_bytes, progress=bar)
        if arguments.extend is not None:
            return extend(open_tokenizer(arguments.extend), texts, arguments.vocab_size)
        return TRAINERS[arguments.type or "bpe"](texts, arguments.vocab_size)


def open_tokenizer(path: str) -> Tokenizer:
    """The `tokenizers.Tokenizer` in the file or URL `path`."""
    if load_tokenizer(path).engine == "sentencepiece":
        hint = "train the model with the tokens as its control_symbols"
        raise FieldError("--extend", "be a tokenizer.json", got=f"{path}, a SentencePiece model", hint=hint)
    return Tokenizer.from_file(str(local_file(path)))
