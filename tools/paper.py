"""Regenerates the tables and figures of docs/research/ (paper.md, performance.md, verdict.md, recipe.md, variants.md,
vocabularies.md) and docs/items.md: `python tools/paper.py EXPERIMENT --text english.jsonl.zst`.

Tokenizers, datasets, runs, logs and results are written to --folder; a second call reuses what is finished and resumes
the rest.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path

from megahead.data.sources import find_inputs
from megahead.errors import existing_path, run_command
from megahead.report.tables import terminal

ROOT = Path(__file__).resolve().parents[1]
# Each maps to the module of `experiments` with its `compare_NAME`, which says what it trains. `bottleneck`: that of a
# softmax's gradient; `neighbours`: related methods of the literature; `verdict`: headless and vanilla at equal time.
EXPERIMENTS = {
    **dict.fromkeys(("latency", "decoders", "variants", "negatives", "precision"), "figures"),
    **dict.fromkeys(("encoders", "multilingual", "vocabularies", "glue"), "encoders"),
    **dict.fromkeys(("continuing", "revocabulary"), "continuing"),
    **{name: name for name in ("neighbours", "recipe", "verdict", "bottleneck", "retrieval", "items")},
    "large_vocabularies": "vocabularies",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument(
        "--text", type=Path, metavar="F", help="what to read, as tools/preprocess.py takes it (items: its table)"
    )
    tasks_help = "task files, as tools/eval_harness.py takes them"
    parser.add_argument("--tasks-data", type=existing_path, metavar="DIR", help=tasks_help)
    tokenizer_help = "revocabulary: another tokenizer.json to change to as well; retrieval: one in place of its own"
    parser.add_argument("--tokenizer", type=existing_path, metavar="F", help=tokenizer_help)
    columns_help = "items: the table's columns (default: user_id item_id timestamp)"
    columns = ("user_id", "item_id", "timestamp")
    parser.add_argument("--columns", nargs=3, default=columns, metavar=("USER", "ITEM", "TIME"), help=columns_help)
    rivals_help = "items: an interpreter with rectools[torch] (default: this one)"
    parser.add_argument("--rivals-python", type=existing_path, metavar="F", help=rivals_help)
    minutes_help = "items, continuing: CPU minutes of each run (default: items 25 epochs, continuing 4)"
    parser.add_argument("--minutes", type=float, metavar="M", help=minutes_help)
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="where all of it goes")
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN", help="these runs alone")
    ranks_help = "each run on N ranks of this machine (default: 1)"
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help=ranks_help)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of every run")
    arguments = parser.parse_args()
    if arguments.text is not None and arguments.experiment not in ("items", "multilingual"):  # which read other data
        find_inputs([arguments.text])  # reports its errors before the slow import of torch
    folder = (arguments.folder / arguments.experiment).absolute()
    paths = (arguments.text, arguments.tasks_data, arguments.tokenizer, arguments.rivals_python)
    text, data, tokenizer, rivals_python = (path and path.absolute() for path in paths)
    os.chdir(ROOT)
    module = import_module(f"experiments.{EXPERIMENTS[arguments.experiment]}")
    from experiments.runner import ExperimentRunner

    options = {"tasks_data": data, "tokenizer": tokenizer, "ranks": arguments.ranks}
    options |= {"columns": arguments.columns, "rivals_python": rivals_python, "minutes": arguments.minutes}
    runner = ExperimentRunner(folder, text, arguments.set, terminal(), **options)
    getattr(module, f"compare_{arguments.experiment}")(runner, arguments.only)


if __name__ == "__main__":
    run_command(main)
