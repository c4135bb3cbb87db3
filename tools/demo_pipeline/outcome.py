"""What the demo ends with: a paragraph by the model, the table of heads, the time of each stage, a plot, the paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from demo_pipeline.stages import Stages, duration
from megahead.evaluate.generation import continuation, sampling_options
from megahead.hf.published import load_causal, load_tokenizer_folder
from megahead.report.figures import save_curves
from megahead.report.read import read_metrics
from megahead.report.tables import to_rich

PROMPT = "Return a new array"


def show(folder: Path, rows: list[dict[str, Any]], stages: Stages) -> None:
    """Prints everything to the stages' console and writes `folder`/curves.png."""
    console = stages.console
    runs = list(dict.fromkeys(row["run"] for row in rows))
    save_curves([read_metrics(folder / "runs" / name) for name in runs], folder / "curves.png")
    console.rule("what it says")
    console.print(PROMPT, style="bold", end="")
    console.print(speak(folder / "models/head-trained"), markup=False)
    console.rule("held-out text")
    console.print(to_rich([_narrow(row) for row in rows]))
    tied, pmi, trained = (row["perplexity"] for row in rows[:3])
    console.print(f"perplexity of the pmi head: {pmi / tied:.2f} x tied, {pmi / trained:.2f} x trained")
    console.rule("time")
    console.print(stages.table())
    console.rule("what it made")
    for name, path in (
        ("curves", "curves.png"),
        ("table", "results.json"),
        ("models", "models (Hugging Face folders)"),
        ("runs", f"runs (tensorboard --logdir {folder}/runs)"),
    ):
        console.print(f"{name:<8}{folder}/{path}", soft_wrap=True)


def speak(model: Path) -> str:
    """Some hundred tokens after PROMPT."""
    torch.manual_seed(0)
    sampling = sampling_options(temperature=0.7, top_k=40, top_p=0.95)
    return continuation(load_causal(model), load_tokenizer_folder(model), PROMPT, 100, sampling)


def _narrow(row: dict[str, Any]) -> dict[str, object]:
    """A row as narrow as a terminal."""
    return {
        "model": row["model"],
        "perplexity": row["perplexity"],
        "bits/byte": row["bits_per_byte"],
        "next token": f"{row['next_token']:.1%}",
        "last word": f"{100 * row['last_word']:.1f}±{100 * row['last_word_stderr']:.1f}%",
        "tokens/s": round(row["tokens"] / row["seconds"]),
        "trained": duration(row["seconds"]),
    }
