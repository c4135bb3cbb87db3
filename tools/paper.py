"""Regenerates the tables and figures of docs/research/paper.md, verdict.md, recipe.md, variants.md and vocabularies.md:
`python tools/paper.py EXPERIMENT --text english.jsonl.zst`.

Tokenizers, datasets, runs, logs and results lie in --folder; a second call reuses what is finished and resumes what is
not.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path

from megahead.data.sources import find_inputs
from megahead.errors import existing, run_command
from megahead.terminal import terminal

ROOT = Path(__file__).resolve().parents[1]
# Those of docs/research/paper.md in its order, then others; each is `compare_NAME` of `experiments/NAME.py`
EXPERIMENTS = (
    "latency",
    "decoders",
    "encoders",
    "multilingual",
    "vocabularies",
    "negatives",
    "synonyms",
    "variants",
    "revocabulary",
    "precision",
    "recipe",
    "verdict",
    "bottleneck",
    "shapes",
    "large_vocabularies",
    "neighbours",
    "glue",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--text", type=Path, metavar="F", help="what to read, as tools/preprocess.py takes it")
    parser.add_argument(
        "--tasks-data", type=existing, metavar="DIR", help="task files, as tools/eval_harness.py takes them"
    )
    parser.add_argument(
        "--tokenizer", type=existing, metavar="F", help="revocabulary: another tokenizer.json to change to as well"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="where all of it goes")
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN", help="these runs alone")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="each run on N ranks of this machine (default: 1)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of every run")
    arguments = parser.parse_args()
    if arguments.text is not None:
        find_inputs([arguments.text])  # what is wrong with it is told before torch is imported
    folder, text = (arguments.folder / arguments.experiment).absolute(), arguments.text and arguments.text.absolute()
    tasks = arguments.tasks_data and arguments.tasks_data.absolute()
    tokenizer = arguments.tokenizer and arguments.tokenizer.absolute()
    os.chdir(ROOT)
    experiment = getattr(import_module(f"experiments.{arguments.experiment}"), f"compare_{arguments.experiment}")
    from experiments.laboratory import Laboratory

    console = terminal()
    laboratory = Laboratory(
        *(folder, text, arguments.set, console), tasks_data=tasks, tokenizer=tokenizer, ranks=arguments.ranks
    )
    experiment(laboratory, arguments.only)


if __name__ == "__main__":
    run_command(main)
