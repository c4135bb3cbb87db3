"""From the text on this machine to a speaking headless model, in one command.

  make demo                       all of it
  make demo ARGS=--quick          the same stages on less text: a few minutes
  make demo ARGS=--with-vanilla   and the same decoder with a usual softmax
  make demo ARGS="--model llama"  a Llama instead of Pythia's shape

A corpus is made from the documentation of the installed packages, a tokenizer
from the corpus; a small headless decoder is pretrained on two ranks, then a
usual head is fine-tuned for it. Each model is exported as a Hugging Face folder
and evaluated on held-out text. It ends with a paragraph by the model, a table
of its heads, the time of each stage, and a plot.

Nothing is downloaded. A second call reuses the stages that are finished and
resumes the one that is not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from demo_pipeline.sizes import FULL, MODELS, QUICK
from megahead.errors import run_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less text, fewer steps")
    parser.add_argument("--model", choices=MODELS, default="pythia", help="the decoder's shape (default: pythia)")
    parser.add_argument("--with-vanilla", action="store_true", help="also train the vanilla twin for the same time")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help=f"where all of it goes (default: {FULL.folder}, or {QUICK.folder}; of another model {FULL.folder}-MODEL)",
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of every run")
    arguments = parser.parse_args()
    size = (QUICK if arguments.quick else FULL).of(arguments.model)
    folder = (arguments.folder or Path(size.folder)).absolute()
    size.claim(folder)
    from demo_pipeline.pipeline import ROOT, Pipeline, show

    os.chdir(ROOT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    pipeline = Pipeline(folder, Console(highlight=False), size=size, overrides=arguments.set)
    rows = pipeline.run(with_vanilla=arguments.with_vanilla)
    show(folder, rows, pipeline.stages)
    if arguments.quick:
        pipeline.console.print("all of it, with five times the steps: make demo")


if __name__ == "__main__":
    run_command(main)
