"""Regenerates a table of docs/ on a text: `python tools/paper.py EXPERIMENT --text english.jsonl.zst`.

Tokenizers, datasets, runs, logs and results lie in --folder; a second call reuses what is finished and resumes what is
not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from megahead.errors import run_command
from paper.decoders import compare_decoders
from paper.encoders import compare_encoders
from paper.laboratory import ROOT, Laboratory
from paper.negatives import compare_negatives
from paper.variants import compare_variants
from paper.vocabularies import compare_vocabularies

EXPERIMENTS = {
    "variants": compare_variants,
    "decoders": compare_decoders,
    "encoders": compare_encoders,
    "negatives": compare_negatives,
    "vocabularies": compare_vocabularies,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--text", type=Path, required=True, metavar="F", help="text, as tools/preprocess.py takes it")
    parser.add_argument(
        "--tasks-data", type=Path, metavar="DIR", help="task files, as tools/eval_harness.py takes them"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="where all of it goes")
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN", help="these runs alone")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of every run")
    arguments = parser.parse_args()
    text, folder = arguments.text.absolute(), (arguments.folder / arguments.experiment).absolute()
    tasks = arguments.tasks_data and arguments.tasks_data.absolute()
    os.chdir(ROOT)
    laboratory = Laboratory(folder, text, arguments.set, Console(highlight=False), tasks_data=tasks)
    EXPERIMENTS[arguments.experiment](laboratory, arguments.only)


if __name__ == "__main__":
    run_command(main)
