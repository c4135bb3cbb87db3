"""Trains a small headless model on text of this machine, in one command.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from megahead.errors import FieldError, run_command

# Settings of each decoder of the demo; all have the same depth and width
MODELS: Mapping[str, Sequence[str]] = {"pythia": (), "llama": ("model.family=llama", "model.activation=silu")}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size of the demo; settings are overrides `a.b=c` of `configs/demo-NAME.yaml`."""

    name: str
    folder: str  # in the root of the checkout
    # Total size of the source files whose documentation is read, sampled by hash; None: every file
    source_bytes: int | None = None
    held_out: float = 0.04  # share of these files kept for evaluation
    tokenizer_bytes: int = 20_000_000  # of text that the tokenizer is trained on
    settings: Sequence[str] = ()  # of every run
    run_settings: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of one run, by its name

    def for_model(self, model: str) -> Size:
        """Returns this size for another of `MODELS`, with its own folder."""
        if not MODELS[model]:
            return self
        settings = [*self.settings, *MODELS[model]]
        return replace(self, name=f"{self.name} {model}", folder=f"{self.folder}-{model}", settings=settings)

    def claim(self, folder: Path) -> None:
        """Marks `folder` as one of this size. FieldError if it has a demo of another size."""
        marker = folder / "size.txt"
        existing_name = marker.read_text(encoding="utf-8").strip() if marker.exists() else self.name
        if existing_name != self.name:
            rule = f"hold no demo but a {self.name} one"
            raise FieldError("--folder", rule, got=f"{folder} with a {existing_name} one", hint="name another, or none")
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(self.name + "\n", encoding="utf-8")


_FEW_STEPS = ("training.steps=160", "schedule.warmup_steps=20", "training.checkpoint_every=80")

FULL = Size(name="full", folder="demo")

# The model of FULL, on a sixth of the text
QUICK = Size(
    name="quick",
    folder="demo-quick",
    source_bytes=40_000_000,
    held_out=0.15,
    tokenizer_bytes=5_000_000,
    settings=["training.evaluate_samples=128"],
    run_settings={
        "headless": [*_FEW_STEPS, "training.evaluate_every=40"],
        "vanilla": _FEW_STEPS,
        "head": ["training.steps=40", "training.evaluate_every=20"],
    },
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less text, fewer steps")
    parser.add_argument("--model", choices=MODELS, default="pythia", help="the decoder's shape (default: pythia)")
    parser.add_argument("--with-vanilla", action="store_true", help="also train it with a softmax for the same time")
    folder_help = f"where all files go (default: {FULL.folder}, or {QUICK.folder}; another model: {FULL.folder}-MODEL)"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=folder_help)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of every run")
    arguments = parser.parse_args()
    size = (QUICK if arguments.quick else FULL).for_model(arguments.model)
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
