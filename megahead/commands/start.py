"""From text to a model that writes, in about ten minutes: tokenizer, dataset, a headless run, its report, an export.

megahead start my-texts                        # a file, or all files in a folder
megahead start my-texts --dry-run              # print the plan
megahead start my-texts --minutes 60 --tokenizer tokenizer.json --folder big

Text is .txt and .md (a file is a document), .jsonl, .json, .csv, .tsv, .parquet (a record is one), plain or compressed
(.gz, .zst); a record's text is `text`, `content` or its longest field. Files that cannot be read are listed. A part
of the text is held out; model size and steps are chosen by the training speed of this machine. The same command again
resumes.
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
    parser.add_argument("--minutes", type=float, default=10, metavar="M", help="about how long it takes (default: 10)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for all results (default: NAME-headless)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    arguments = parser.parse_args()
    from megahead.quickstart import start

    start(**vars(arguments))
