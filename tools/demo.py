"""From the text on this machine to a speaking headless model, in one command: `make demo`.

Corpus, tokenizer, index, pretraining, head, export, evaluation, a paragraph, a plot. All of it lies in demo/;
a second call reuses what is finished and resumes what is not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from megahead.errors import run_command

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and evaluate a small headless model on text from this machine.")
    parser.add_argument("--with-vanilla", action="store_true", help="also train the vanilla twin for the same time")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where all of it goes (default: demo)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of every run")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    os.chdir(ROOT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from demo_pipeline.outcome import show  # these need transformers
    from demo_pipeline.pipeline import Pipeline

    pipeline = Pipeline(folder, Console(highlight=False), overrides=arguments.set)
    rows = pipeline.run(with_vanilla=arguments.with_vanilla)
    show(folder, rows, pipeline.stages)


if __name__ == "__main__":
    run_command(main)
