"""Shows what an indexed dataset holds, compares its checksums and warns of flaws that would spoil training.

megahead inspect-dataset PREFIX --tokenizer tokenizer.json
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from megahead.data.inspection import Inspection, inspect_dataset
from megahead.data.tokenizer import Tokenizer, load_tokenizer
from megahead.data.writer import ProgressBar
from megahead.terminal import terminal
from megahead.wording import pluralize

BAR_WIDTH = 40
TOKENS_SHOWN = 128


def main() -> None:
    arguments = parse()
    given = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    with ProgressBar("Reading") as bar:
        inspection = inspect_dataset(arguments.prefix, verify=not arguments.quick, progress=bar)
    dataset, console = inspection.dataset, terminal()
    beside = dataset.tokenizer_path()
    tokenizer = load_tokenizer(beside) if given is None and beside is not None else given
    known = None if dataset.info is None else dataset.info.end_token
    end_token = (known or 0) if arguments.end_token is None else arguments.end_token
    table = Table("", arguments.prefix, show_header=True)
    for name, value in inspection.facts(end_token):
        table.add_row(name, value)
    console.print(table)
    console.print(lengths(inspection))
    count = len(inspection.dataset)
    spread = [count * k // arguments.samples for k in range(arguments.samples)] if count else []
    for i in sorted(set(arguments.sequence or spread)):
        show(console, inspection, i, tokenizer)
    for warning in inspection.warnings(end_token, tokenizer):
        console.print(f"warning: {warning}", style="bold yellow", soft_wrap=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", metavar="PREFIX", help="path of the .bin and .idx files, without ending")
    tokenizer = "tokenizer.json or .model, to show text (default: the dataset's)"
    parser.add_argument("--tokenizer", metavar="T", help=tokenizer)
    parser.add_argument("--sequence", type=int, nargs="+", metavar="I", help="which sequences to show")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="sequences to show, evenly spread")
    end = "id that closes documents (default: the dataset's, else 0)"
    parser.add_argument("--end-token", type=int, metavar="ID", help=end)
    parser.add_argument("--quick", action="store_true", help="do not read the tokens to compare checksums")
    return parser.parse_args()


def lengths(inspection: Inspection) -> Table:
    """The histogram of sequence lengths."""
    table = Table("tokens", "sequences", "", show_header=True)
    rows = inspection.histogram()
    most = max((count for _, count in rows), default=1)
    for span, count in rows:
        table.add_row(span, f"{count:,}", "█" * -(-BAR_WIDTH * count // most))
    return table


def show(console: Console, inspection: Inspection, i: int, tokenizer: Tokenizer | None) -> None:
    """How sequence `i` begins, as ids and as text."""
    tokens = inspection.sequence(i)
    console.print(f"sequence {i:,} ({pluralize(len(tokens), 'token')}) begins: {tokens[:16].tolist()}")
    if tokenizer is not None:
        known = tokens[:TOKENS_SHOWN][tokens[:TOKENS_SHOWN] < tokenizer.vocab_size]
        console.print(tokenizer.decode(known))
