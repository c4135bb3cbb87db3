"""From text to a model that writes, in about ten minutes: tokenizer, ids, a headless run, its report, a model.

megahead start my-texts                        # a folder with all that is in it, or a file
megahead start my-texts --dry-run              # what would be done
megahead start my-texts --minutes 60 --tokenizer tokenizer.json --folder big

Text is .txt and .md (a file is a document), .jsonl, .json, .csv, .tsv, .parquet (a record is one), plain or packed
(.gz, .zst); in records it is what lies under `text` or `content`, or else the longest. What cannot be read is named. A
part of the text is held out, and the shape of the model and its steps are chosen by how fast this machine trains. The
same command again goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megahead.errors import existing_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=existing_path, metavar="PATH", help="a folder or file of text")
    parser.add_argument(
        "--tokenizer", type=existing_path, metavar="T", help="tokenizer.json or .model (default: train one)"
    )
    parser.add_argument("--minutes", type=float, default=10, metavar="M", help="for all of it, about (default: 10)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where all of it goes (default: NAME-headless)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    arguments = parser.parse_args()
    from megahead.quickstart import start

    start(**vars(arguments))
