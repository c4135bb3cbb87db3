"""Regenerates a table of docs/: `python tools/paper.py EXPERIMENT --data PREFIX --tokenizer T`.

PREFIX and PREFIX-validation are datasets of tools/preprocess.py (with --holdout). Runs, logs and results lie in
--folder; a second call reuses what is finished and resumes what is not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from megahead.errors import run_command
from paper.laboratory import ROOT, Laboratory
from paper.variants import compare_variants

EXPERIMENTS = {"variants": compare_variants}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, required=True, help="dataset prefix; PREFIX-validation is held out")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the tokenizer.json that made the dataset")
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="where all of it goes")
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN", help="these runs alone")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of every run")
    arguments = parser.parse_args()
    data, tokenizer = arguments.data.absolute(), arguments.tokenizer.absolute()
    settings = [f"data.train={data}", f"data.validation={data}-validation", f"data.tokenizer={tokenizer}"]
    folder = (arguments.folder / arguments.experiment).absolute()
    os.chdir(ROOT)
    laboratory = Laboratory(folder, [*settings, *arguments.set], Console(highlight=False))
    EXPERIMENTS[arguments.experiment](laboratory, arguments.only)


if __name__ == "__main__":
    run_command(main)
