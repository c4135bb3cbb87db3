"""The demo's stages, each reading files of earlier ones: those of `megahead start`, plus a corpus, a softmax
head fine-tuned for the headless model, and evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from demo_pipeline.corpus import build_cloze, build_corpus
from megahead.config.loading import load_config
from megahead.config.objective import HeadName
from megahead.data.preprocess import preprocess
from megahead.data.records import Selection
from megahead.data.tokenizer import load_tokenizer
from megahead.data.writer import ProgressBar
from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.files import write_atomically
from megahead.hf.export import export
from megahead.quickstart import make_tokenizer
from megahead.report.figures import draw_curves, save_figure
from megahead.report.read import read_metrics
from megahead.report.tables import to_rich
from megahead.run_folder import RunFolder
from megahead.run_process import measure_step_seconds, pretrain
from megahead.sharing import sample
from megahead.wording import format_duration
from steps.once import StepRunner

if TYPE_CHECKING:
    from demo import Size

ROOT = Path(__file__).resolve().parents[2]
RANKS = min(2, torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1)


class Pipeline:
    """Runs the stages in `folder`; documentation is read from `roots` (default: all installed packages).

    `overrides` (`a.b=c`) apply to every run, and take precedence over the settings of `size`.
    """

    def __init__(
        self, folder: Path, console: Console, *, size: Size, overrides: Sequence[str] = (), roots: Sequence[Path] = ()
    ) -> None:
        self.folder, self.console, self.size, self.overrides = folder, console, size, overrides
        self.stages, self.roots = StepRunner(folder / "stages", console), roots
        self.corpus, self.data = folder / "corpus", folder / "data"
        self.tokenizer, self.cloze = folder / "tokenizer.json", folder / "cloze.jsonl"

    def settings(self, name: str, *extra: str) -> list[str]:
        """Overrides of the run `name`; later ones take precedence."""
        return [
            f"data.train={self.data}/train",
            f"data.validation={self.data}/held_out",
            f"data.tokenizer={self.tokenizer}",
            *self.size.settings,
            *self.size.run_settings.get(name, ()),
            *self.overrides,
            f"output_dir={self.folder}/runs/{name}",
            *extra,
        ]

    def run(self, *, with_vanilla: bool) -> list[dict[str, Any]]:
        """Runs all stages; returns a row of measurements for each model."""
        headless = load_config("demo-headless", self.settings("headless"))
        self._make_text(headless.model.vocab_size)
        self._train("headless")
        base = self.folder / "runs/headless"
        self._train("head", [f"init.from_checkpoint={base}"], inputs=[base / "checkpoints/latest"])
        models: list[tuple[str, str, HeadName]] = [("tied head", "headless", "tied"), ("pmi head", "headless", "pmi")]
        models += [("trained head", "head", "trained")]
        if with_vanilla:
            self._train_vanilla()
            models += [("vanilla twin", "vanilla", "trained")]
        rows = [{"model": title, "run": name, **self._evaluate(name, head)} for title, name, head in models]
        write_atomically(self.folder / "results.json", json.dumps(rows, indent=1) + "\n")
        return rows

    def _make_text(self, vocab_size: int) -> None:
        """Builds the corpus, its tokenizer, the indexed datasets and the last-word test, unless they exist."""
        train, held_out = texts = [self.corpus / f"{split}.jsonl" for split in ("train", "held_out")]
        options: dict[str, Any] = {"source_bytes": self.size.source_bytes, "held_out": self.size.held_out}

        def make_corpus() -> str:
            return build_corpus(self.corpus, roots=self.roots, **options).summary()

        def make_cloze() -> str:
            return f"{build_cloze(held_out, self.cloze)} passages whose last word is to be guessed"

        def train_tokenizer() -> str:
            make_tokenizer([train], Selection(), vocab_size, self.tokenizer, max_bytes=self.size.tokenizer_bytes)
            return f"byte-level BPE, {load_tokenizer(str(self.tokenizer)).vocab_size:,} ids"

        settings = {"roots": [str(root) for root in self.roots], **options}
        self.stages.run("corpus", make_corpus, settings=settings, outputs=texts)
        settings = {"vocab_size": vocab_size, "bytes": self.size.tokenizer_bytes}
        self.stages.run("tokenizer", train_tokenizer, settings=settings, inputs=[train], outputs=[self.tokenizer])
        self.stages.run("index", self._index, inputs=[*texts, self.tokenizer], outputs=[self.data])
        self.stages.run("cloze", make_cloze, inputs=[held_out], outputs=[self.cloze])

    def _index(self) -> str:
        self.data.mkdir(parents=True, exist_ok=True)
        reports = []
        for split in ("train", "held_out"):
            with ProgressBar(f"Tokenizing {split}") as bar:
                text = [self.corpus / f"{split}.jsonl"]
                reports.append(preprocess(text, self.tokenizer, self.data / split, progress=bar))
        train_tokens, held_out_tokens = (report.tokens for report in reports)
        bytes_each = sum(report.text_bytes for report in reports) / (train_tokens + held_out_tokens)
        return f"{train_tokens:,} tokens and {held_out_tokens:,} held out, {bytes_each:.2f} bytes a token"

    def _train(self, name: str, extra: Sequence[str] = (), inputs: Sequence[Path] = ()) -> None:
        run, overrides = self.folder / "runs" / name, self.settings(name, *extra)
        config = load_config(f"demo-{name}", overrides).model_dump(mode="json")
        settings, checkpoints = {"run": config, "ranks": RANKS}, RunFolder(run).checkpoints

        def train() -> str:
            pretrain(f"demo-{name}", overrides, ranks=RANKS)
            metrics = read_metrics(run)
            tokens, perplexity = metrics.training[-1]["tokens"], metrics.validation[-1]["perplexity"]
            return f"{tokens:,} tokens, held-out perplexity {perplexity:,.0f}"

        self.stages.run(f"train {name}", train, settings=settings, inputs=[self.data, *inputs], outputs=[checkpoints])

    def _train_vanilla(self) -> None:
        """Trains for as many steps as fit in the time of the headless run, with a schedule of that length."""
        seconds = read_metrics(self.folder / "runs/headless").training[-1]["seconds"]
        config = load_config("demo-vanilla", self.settings("vanilla")).model_dump(mode="json", exclude_unset=True)
        step_time = self.stages.run(
            "time vanilla",
            lambda: measure_step_seconds(config, ranks=RANKS),
            settings={"seconds": seconds, "config": config, "ranks": RANKS},
            describe_result=lambda seconds: f"{seconds:.2f} s a step",
        )
        steps = max(20, int(seconds / step_time.result))
        self._train("vanilla", [f"training.steps={steps}", f"training.evaluate_every={max(1, steps // 8)}"])

    def _evaluate(self, name: str, head: HeadName) -> dict[str, Any]:
        """Exports the run with a head, scores it, and returns its measurements."""
        run, model = self.folder / "runs" / name, self.folder / "models" / f"{name}-{head}"
        scores = self.folder / "scores" / f"{name}-{head}.json"
        latest = run / "checkpoints/latest"

        def to_hugging_face() -> str:
            error = max(export(run, model, head).parity.largest_error.values())
            return f"logits equal to the run's within {error:.1e}"

        self.stages.run(f"export {name} {head}", to_hugging_face, inputs=[latest], outputs=[model])
        score, inputs = lambda: self._score(run, model, head, scores), [latest, model, self.cloze]
        self.stages.run(f"evaluate {name} {head}", score, inputs=inputs, outputs=[scores])
        last, figures = read_metrics(run).training[-1], json.loads(scores.read_text(encoding="utf-8"))
        return {**figures, "seconds": last["seconds"], "tokens": last["tokens"]}

    def _score(self, run: Path, model: Path, head: HeadName, output: Path) -> str:
        held_out = evaluate_checkpoint(run, head)
        (cloze,) = evaluate_tasks(model, {"cloze": self.cloze}, batch_size=16)
        accuracy = next(score for score in cloze.scores if score.metric == "acc")
        figures = {"perplexity": held_out.perplexity, "bits_per_byte": held_out.bits_per_byte}
        figures |= {"next_token": held_out.accuracy, "last_word": accuracy.value, "last_word_stderr": accuracy.stderr}
        write_atomically(output, json.dumps(figures, indent=1) + "\n")
        return f"perplexity {held_out.perplexity:,.1f}, last word {accuracy.value:.1%}"


PROMPT = "Return a new array"


def show(folder: Path, rows: list[dict[str, Any]], stages: StepRunner) -> None:
    """Prints the results to the stages' console and writes `folder`/curves.png."""
    console = stages.console
    runs = list(dict.fromkeys(row["run"] for row in rows))
    save_figure(draw_curves([read_metrics(folder / "runs" / name) for name in runs]), folder / "curves.png")
    console.rule("what it says")
    console.print(PROMPT, style="bold", end="")
    console.print(sample(folder / "models/head-trained", PROMPT, 100), markup=False)
    console.rule("held-out text")
    console.print(to_rich([_display_row(row) for row in rows]))
    tied, pmi, trained = (row["perplexity"] for row in rows[:3])
    console.print(f"perplexity of the pmi head: {pmi / tied:.2f} x tied, {pmi / trained:.2f} x trained")
    console.rule("time")
    console.print(to_rich(time_rows(stages), right=["time"]))
    console.rule("what it made")
    path_by_name = {"curves": "curves.png", "table": "results.json", "models": "models (Hugging Face folders)"}
    for name, path in {**path_by_name, "runs": f"runs (tensorboard --logdir {folder}/runs)"}.items():
        console.print(f"{name:<8}{folder}/{path}", soft_wrap=True)


def time_rows(stages: StepRunner) -> list[dict[str, str]]:
    """The time of every stage, and that of this call."""
    rows = []
    for stage in stages.finished:
        taken = "reused" if stage.reused else format_duration(stage.seconds)
        rows.append({"stage": stage.name, "time": taken, "result": stage.description})
    spent = sum(stage.seconds for stage in stages.finished if not stage.reused)
    return [*rows, {"stage": "this call", "time": format_duration(spent)}]


def _display_row(row: dict[str, Any]) -> dict[str, object]:
    """The columns of a row that fit a terminal."""
    return {
        "model": row["model"],
        "perplexity": row["perplexity"],
        "bits/byte": row["bits_per_byte"],
        "next token": f"{row['next_token']:.1%}",
        "last word": f"{100 * row['last_word']:.1f}±{100 * row['last_word_stderr']:.1f}%",
        "tokens/s": round(row["tokens"] / row["seconds"]),
        "trained": format_duration(row["seconds"]),
    }
