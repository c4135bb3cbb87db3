"""The demo's stages, each resting on files of the ones before, and what they end with: the parts of `megahead start`,
with a corpus, a second head and scores beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from demo_pipeline.corpus import build_cloze, build_corpus
from megahead.config.loading import load_config
from megahead.config.objective import HeadName
from megahead.data.preprocess import preprocess
from megahead.data.records import Selection
from megahead.data.tokenizer import load_tokenizer
from megahead.data.writer import ProgressBar
from megahead.evaluate.harness import evaluate_harness
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import export
from megahead.quickstart import make_tokenizer, pretrain, step_seconds
from megahead.report.figures import draw_curves, save_figure
from megahead.report.read import read_metrics
from megahead.report.tables import to_rich
from megahead.run_folder import RunFolder
from megahead.sharing import sample
from megahead.wording import format_duration
from steps.once import Once

if TYPE_CHECKING:
    from demo import Size

ROOT = Path(__file__).resolve().parents[2]
RANKS = min(2, torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1)


class Text:
    """Files in `folder`, a training and a held-out half of each; `roots` are searched for documentation."""

    def __init__(self, folder: Path, size: Size, roots: Sequence[Path]) -> None:
        self.size, self.roots = size, roots
        self.corpus, self.data = folder / "corpus", folder / "data"
        self.tokenizer, self.cloze = folder / "tokenizer.json", folder / "cloze.jsonl"

    def make(self, stages: Once, vocab_size: int) -> None:
        """A corpus from this machine, a tokenizer made from it, the corpus as ids, a last-word test; as far as they are
        not there."""
        roots, size = [str(root) for root in self.roots], self.size
        train, held_out = (self.corpus / f"{half}.jsonl" for half in ("train", "held_out"))
        reads: dict[str, Any] = {"source_bytes": size.source_bytes, "held_out": size.held_out}
        stages.run(
            "corpus",
            lambda: build_corpus(self.corpus, roots=self.roots, **reads).summary(),
            settings={"roots": roots, **reads},
            outputs=[train, held_out],
        )
        stages.run(
            "tokenizer",
            lambda: self._train_tokenizer(train, vocab_size),
            settings={"vocab_size": vocab_size, "bytes": size.tokenizer_bytes},
            inputs=[train],
            outputs=[self.tokenizer],
        )
        stages.run("index", self._index, inputs=[train, held_out, self.tokenizer], outputs=[self.data])
        stages.run("cloze", lambda: self._cloze(held_out), inputs=[held_out], outputs=[self.cloze])

    def _cloze(self, held_out: Path) -> str:
        return f"{build_cloze(held_out, self.cloze)} passages whose last word is to be guessed"

    def _train_tokenizer(self, text: Path, vocab_size: int) -> str:
        make_tokenizer([text], Selection(), vocab_size, self.tokenizer, max_bytes=self.size.tokenizer_bytes)
        return f"byte-level BPE, {load_tokenizer(str(self.tokenizer)).vocab_size:,} ids"

    def _index(self) -> str:
        self.data.mkdir(parents=True, exist_ok=True)
        reports = []
        for half in ("train", "held_out"):
            with ProgressBar(f"Tokenizing {half}") as bar:
                text = [self.corpus / f"{half}.jsonl"]
                reports.append(preprocess(text, self.tokenizer, self.data / half, progress=bar))
        train_tokens, held_tokens = (report.tokens for report in reports)
        bytes_each = sum(report.text_bytes for report in reports) / (train_tokens + held_tokens)
        return f"{train_tokens:,} tokens and {held_tokens:,} held out, {bytes_each:.2f} bytes a token"


class Pipeline:
    """Everything happens in `folder`; `roots` are searched for documentation (default: all that is installed).

    `overrides` are `a.b=c`, for every run, and count before what `size` says.
    """

    def __init__(
        self, folder: Path, console: Console, *, size: Size, overrides: Sequence[str] = (), roots: Sequence[Path] = ()
    ) -> None:
        self.folder, self.console, self.size, self.overrides = folder, console, size, overrides
        self.stages = Once(folder / "stages", console)
        self.text = Text(folder, size, roots)

    def settings(self, name: str, *extra: str) -> list[str]:
        """Of the run `name`, over its config; the later counts."""
        return [
            f"data.train={self.text.data}/train",
            f"data.validation={self.text.data}/held_out",
            f"data.tokenizer={self.text.tokenizer}",
            *self.size.settings,
            *self.size.settings_of.get(name, ()),
            *self.overrides,
            f"output_dir={self.folder}/runs/{name}",
            *extra,
        ]

    def run(self, *, with_vanilla: bool) -> list[dict[str, Any]]:
        """All stages; a row of figures for each model."""
        headless = load_config("demo-headless", self.settings("headless"))
        self.text.make(self.stages, headless.model.vocab_size)
        self._train("headless")
        base = self.folder / "runs/headless"
        self._train("head", [f"init.from_checkpoint={base}"], inputs=[base / "checkpoints/latest"])
        models: list[tuple[str, str, HeadName]] = [("tied head", "headless", "tied"), ("pmi head", "headless", "pmi")]
        models += [("trained head", "head", "trained")]
        if with_vanilla:
            self._train_vanilla()
            models += [("vanilla twin", "vanilla", "trained")]
        rows = [{"model": title, "run": name, **self._evaluate(name, head)} for title, name, head in models]
        _write(self.folder / "results.json", rows)
        return rows

    def _train(self, name: str, extra: Sequence[str] = (), inputs: Sequence[Path] = ()) -> None:
        run, overrides = self.folder / "runs" / name, self.settings(name, *extra)
        config = load_config(f"demo-{name}", overrides).model_dump(mode="json")
        settings, checkpoints = {"run": config, "ranks": RANKS}, RunFolder(run).checkpoints

        def work() -> str:
            pretrain(f"demo-{name}", overrides, ranks=RANKS)
            metrics = read_metrics(run)
            tokens, perplexity = metrics.training[-1]["tokens"], metrics.validation[-1]["perplexity"]
            return f"{tokens:,} tokens, held-out perplexity {perplexity:,.0f}"

        read = [self.text.data, *inputs]
        self.stages.run(f"train {name}", work, settings=settings, inputs=read, outputs=[checkpoints])

    def _train_vanilla(self) -> None:
        """As many steps as fit in the time that the headless run took, its schedule fitted to them."""
        seconds = read_metrics(self.folder / "runs/headless").training[-1]["seconds"]
        config = load_config("demo-vanilla", self.settings("vanilla"))

        def work() -> float:
            return step_seconds(config.model_dump(mode="json", exclude_unset=True), ranks=RANKS)

        timed = self.stages.run(
            "time vanilla", work, settings={"seconds": seconds}, say=lambda found: f"{found:.2f} s a step"
        )
        steps = max(20, int(seconds / timed.result))
        self._train("vanilla", [f"training.steps={steps}", f"training.evaluate_every={max(1, steps // 8)}"])

    def _evaluate(self, name: str, head: HeadName) -> dict[str, Any]:
        """Exports the run with a head, scores it, and returns its figures."""
        run, model = self.folder / "runs" / name, self.folder / "models" / f"{name}-{head}"
        scores = self.folder / "scores" / f"{name}-{head}.json"
        latest = run / "checkpoints/latest"

        def to_hugging_face() -> str:
            error = max(export(run, model, head).parity.largest_error.values())
            return f"logits equal to the run's within {error:.1e}"

        self.stages.run(f"export {name} {head}", to_hugging_face, inputs=[latest], outputs=[model])
        score, read = lambda: self._score(run, model, head, scores), [latest, model, self.text.cloze]
        self.stages.run(f"evaluate {name} {head}", score, inputs=read, outputs=[scores])
        last, found = read_metrics(run).training[-1], json.loads(scores.read_text(encoding="utf-8"))
        return {**found, "seconds": last["seconds"], "tokens": last["tokens"]}

    def _score(self, run: Path, model: Path, head: HeadName, output: Path) -> str:
        held_out = evaluate_checkpoint(run, head)
        (cloze,) = evaluate_harness(model, {"cloze": self.text.cloze}, batch_size=16).tasks
        accuracy = next(score for score in cloze.scores if score.metric == "acc")
        figures = {"perplexity": held_out.perplexity, "bits_per_byte": held_out.bits_per_byte}
        figures |= {"next_token": held_out.accuracy, "last_word": accuracy.value, "last_word_stderr": accuracy.stderr}
        _write(output, figures)
        return f"perplexity {held_out.perplexity:,.1f}, last word {accuracy.value:.1%}"


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


PROMPT = "Return a new array"


def show(folder: Path, rows: list[dict[str, Any]], stages: Once) -> None:
    """Prints everything to the stages' console and writes `folder`/curves.png."""
    console = stages.console
    runs = list(dict.fromkeys(row["run"] for row in rows))
    save_figure(draw_curves([read_metrics(folder / "runs" / name) for name in runs]), folder / "curves.png")
    console.rule("what it says")
    console.print(PROMPT, style="bold", end="")
    console.print(sample(folder / "models/head-trained", PROMPT, 100), markup=False)
    console.rule("held-out text")
    console.print(to_rich([_narrow(row) for row in rows]))
    tied, pmi, trained = (row["perplexity"] for row in rows[:3])
    console.print(f"perplexity of the pmi head: {pmi / tied:.2f} x tied, {pmi / trained:.2f} x trained")
    console.rule("time")
    console.print(times(stages))
    console.rule("what it made")
    made = {"curves": "curves.png", "table": "results.json", "models": "models (Hugging Face folders)"}
    for name, path in {**made, "runs": f"runs (tensorboard --logdir {folder}/runs)"}.items():
        console.print(f"{name:<8}{folder}/{path}", soft_wrap=True)


def times(stages: Once) -> Table:
    """The time of every stage, and what this call took."""
    table = Table(box=None, header_style="bold", show_footer=True, pad_edge=False)
    spent = sum(stage.seconds for stage in stages.finished if not stage.reused)
    table.add_column("stage", footer="this run")
    table.add_column("time", footer=format_duration(spent), justify="right")
    table.add_column("result")
    for stage in stages.finished:
        table.add_row(stage.name, "reused" if stage.reused else format_duration(stage.seconds), escape(stage.result))
    return table


def _narrow(row: dict[str, Any]) -> dict[str, object]:
    """A row as narrow as a terminal."""
    return {
        "model": row["model"],
        "perplexity": row["perplexity"],
        "bits/byte": row["bits_per_byte"],
        "next token": f"{row['next_token']:.1%}",
        "last word": f"{100 * row['last_word']:.1f}±{100 * row['last_word_stderr']:.1f}%",
        "tokens/s": round(row["tokens"] / row["seconds"]),
        "trained": format_duration(row["seconds"]),
    }
