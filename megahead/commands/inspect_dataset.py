"""Shows the content of an indexed dataset, verifies its checksums and warns of flaws that would spoil training.

megahead inspect-dataset PREFIX --tokenizer tokenizer.json
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from megahead.data.inspection import Inspection, inspect_dataset
from megahead.data.tokenizer import Tokenizer, load_tokenizer
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
    default_end_token = None if dataset.info is None else dataset.info.end_token
    end_token = (default_end_token or 0) if arguments.end_token is None else arguments.end_token
    table = Table("", arguments.prefix, show_header=True)
    for name, value in inspection.facts(end_token):
        table.add_row(name, value)
    console.print(table)
    console.print(length_histogram(inspection))
    count = len(inspection.dataset)
    samples = [count * k // arguments.samples for k in range(arguments.samples)] if count else []
    for i in sorted(set(arguments.sequence or samples)):
        show_sequence(console, inspection, i, tokenizer)
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


def length_histogram(inspection: Inspection) -> Table:
    """A table of sequence lengths with bars."""
    table = Table("tokens", "sequences", "", show_header=True)
    rows = inspection.histogram()
    max_count = max((count for _, count in rows), default=1)
    for lengths, count in rows:
        table.add_row(lengths, f"{count:,}", "█" * -(-BAR_WIDTH * count // max_count))
    return table


def show_sequence(console: Console, inspection: Inspection, i: int, tokenizer: Tokenizer | None) -> None:
    """Prints the beginning of sequence `i`, as ids and as text."""
    tokens = inspection.sequence(i)
    console.print(f"sequence {i:,} ({pluralize(len(tokens), 'token')}) begins: {tokens[:16].tolist()}")
    if tokenizer is not None:
        known = tokens[:MAX_TOKENS][tokens[:MAX_TOKENS] < tokenizer.vocab_size]
        console.print(tokenizer.decode(known))
