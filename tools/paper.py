"""Regenerates a table or figure of docs/paper.md: `python tools/paper.py EXPERIMENT --text english.jsonl.zst`.

Tokenizers, datasets, runs, logs and results lie in --folder; a second call reuses what is finished and resumes what is
not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from experiments.decoders import compare_decoders
from experiments.encoders import compare_encoders
from experiments.laboratory import ROOT, Laboratory
from experiments.latency import compare_latency
from experiments.multilingual import compare_multilingual
from experiments.negatives import compare_negatives
from experiments.synonyms import compare_synonyms
from experiments.variants import compare_variants
from experiments.vocabularies import compare_vocabularies
from megahead.errors import run_command

EXPERIMENTS = {
    "latency": compare_latency,
    "decoders": compare_decoders,
    "encoders": compare_encoders,
    "multilingual": compare_multilingual,
    "vocabularies": compare_vocabularies,
    "negatives": compare_negatives,
    "synonyms": compare_synonyms,
    "variants": compare_variants,
}
"""In the order of docs/paper.md."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--text", type=Path, metavar="F", help="what to read, as tools/preprocess.py takes it")
    parser.add_argument(
        "--tasks-data", type=Path, metavar="DIR", help="task files, as tools/eval_harness.py takes them"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="where all of it goes")
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN", help="these runs alone")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of every run")
    arguments = parser.parse_args()
    folder, text = (arguments.folder / arguments.experiment).absolute(), arguments.text and arguments.text.absolute()
    tasks = arguments.tasks_data and arguments.tasks_data.absolute()
    os.chdir(ROOT)
    laboratory = Laboratory(folder, text, arguments.set, Console(highlight=False), tasks_data=tasks)
    EXPERIMENTS[arguments.experiment](laboratory, arguments.only)


if __name__ == "__main__":
    run_command(main)
