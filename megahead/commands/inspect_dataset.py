"""Shows the content of an indexed dataset, verifies its checksums and warns of flaws that would spoil training.

megahead inspect-dataset PREFIX --tokenizer tokenizer.json
"""

from __future__ import annotations

import argparse

from rich.table import Table

from megahead.data.inspection import inspect_dataset
from megahead.data.tokenizer import load_tokenizer
from megahead.data.writer import ProgressBar
from megahead.report.tables import terminal
from megahead.wording import pluralize

BAR_WIDTH = 40
MAX_TOKENS = 128


def main() -> None:
    arguments = parse_arguments()
    tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    with ProgressBar("Reading") as bar:
        inspection = inspect_dataset(arguments.prefix, verify=not arguments.quick, progress=bar)
    dataset, console = inspection.dataset, terminal()
    dataset_tokenizer = dataset.tokenizer_path()
    if tokenizer is None and dataset_tokenizer is not None:
        tokenizer = load_tokenizer(dataset_tokenizer)
    end_token = arguments.end_token
    if end_token is None:
        end_token = (dataset.info and dataset.info.end_token) or 0
    table = Table("", arguments.prefix, show_header=True)
    for name, value in inspection.facts(end_token):
        table.add_row(name, value)
    console.print(table)
    lengths, rows = Table("tokens", "sequences", "", show_header=True), inspection.histogram()
    max_count = max((count for _, count in rows), default=1)
    for name, count in rows:
        lengths.add_row(name, f"{count:,}", "█" * -(-BAR_WIDTH * count // max_count))
    console.print(lengths)
    count = len(dataset)
    samples = [count * k // arguments.samples for k in range(arguments.samples)] if count else []
    for i in sorted(set(arguments.sequence or samples)):
        tokens = inspection.sequence(i)
        console.print(f"sequence {i:,} ({pluralize(len(tokens), 'token')}) begins: {tokens[:16].tolist()}")
        if tokenizer is not None:
            known = tokens[:MAX_TOKENS][tokens[:MAX_TOKENS] < tokenizer.vocab_size]
            console.print(tokenizer.decode(known))
    for warning in inspection.warnings(end_token, tokenizer):
        console.print(f"warning: {warning}", style="bold yellow", soft_wrap=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", metavar="PREFIX", help="path of the .bin and .idx files, without ending")
    tokenizer = "tokenizer.json or .model, to show text (default: the dataset's)"
    parser.add_argument("--tokenizer", metavar="T", help=tokenizer)
    parser.add_argument("--sequence", type=int, nargs="+", metavar="I", help="which sequences to show")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="sequences to show, evenly spread")
    end = "id that closes documents (default: the dataset's, else 0)"
    parser.add_argument("--end-token", type=int, metavar="ID", help=end)
    parser.add_argument("--quick", action="store_true", help="skip comparing checksums, which reads all tokens")
    return parser.parse_args()
