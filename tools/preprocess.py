"""Turns text files into an indexed dataset: PREFIX.bin, PREFIX.idx and PREFIX.json (counts and checksums).

tools/preprocess.py --input corpus.jsonl.zst --tokenizer tokenizer.json --output data/corpus --holdout 100
"""

from __future__ import annotations

import argparse
import os
import time
from fractions import Fraction

from megahead.data import Bar, preprocess
from megahead.data.preprocess import END_TOKEN
from megahead.errors import FieldError, run_command


def main() -> None:
    arguments = parse()
    started = time.monotonic()
    with Bar("Tokenizing") as bar:
        report = preprocess(
            arguments.input,
            arguments.tokenizer,
            arguments.output,
            text_key=arguments.text_key,
            end_token=arguments.end_token,
            holdout=None if arguments.holdout is None else fraction(arguments.holdout),
            workers=arguments.workers,
            progress=bar,
        )
    seconds = time.monotonic() - started
    print(
        f"{arguments.output}: {report.documents:,} documents ({report.held_out:,} of them held out, {report.skipped:,} "
        f"empty ones skipped), {report.tokens:,} tokens from {report.text_bytes / 1e6:,.1f} MB of text "
        f"in {seconds:.1f} s with {report.engine}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Turn text files into an indexed dataset.")
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="F", help=".jsonl or .txt (one document), plain, .gz or .zst"
    )
    parser.add_argument("--tokenizer", required=True, metavar="T", help="tokenizer.json")
    parser.add_argument("--output", required=True, metavar="PREFIX")
    parser.add_argument("--text-key", default="text", help="key of the text in each JSON line (default: text)")
    parser.add_argument("--end-token", default=END_TOKEN, help=f"closes each document (default: {END_TOKEN})")
    parser.add_argument(
        "--holdout",
        metavar="N",
        help="every N-th document (N >= 2), or this fraction of them (0.01), goes to PREFIX-validation instead",
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    return parser.parse_args()


def fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise FieldError("--holdout", "be a number, like 100 or 0.01", got=text) from None


if __name__ == "__main__":
    run_command(main)
