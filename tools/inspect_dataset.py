"""Shows what lies in an indexed dataset and compares its checksums.

tools/inspect_dataset.py PREFIX --tokenizer tokenizer.json
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megahead.data import Bar, load_tokenizer
from megahead.data.inspection import inspect_dataset
from megahead.errors import run_command


def main() -> None:
    parser = argparse.ArgumentParser(description="Show what lies in an indexed dataset and compare its checksums.")
    parser.add_argument("prefix", metavar="PREFIX", help="path of the .bin and .idx files, without ending")
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer.json, to show text")
    parser.add_argument("--sequence", type=int, default=0, metavar="I", help="which sequence to show (default: 0)")
    parser.add_argument("--end-token", type=int, default=0, metavar="ID", help="id that closes documents (default: 0)")
    parser.add_argument("--quick", action="store_true", help="do not read the tokens to compare checksums")
    arguments = parser.parse_args()

    tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    with Bar("Reading") as bar:
        inspection = inspect_dataset(arguments.prefix, verify=not arguments.quick, progress=bar)
    table = Table("", arguments.prefix, show_header=True)
    for name, value in inspection.facts(arguments.end_token):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if len(inspection.dataset):
        tokens = inspection.sequence(arguments.sequence)
        console.print(f"sequence {arguments.sequence} begins: {tokens[:32].tolist()}")
        if tokenizer is not None:
            console.print(escape(tokenizer.decode(tokens[:256])), highlight=False)


if __name__ == "__main__":
    run_command(main)
