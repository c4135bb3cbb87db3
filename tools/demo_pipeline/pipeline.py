"""The demo's stages, each resting on files of the ones before, and what they end with.

Runs are started by DeepSpeed's launcher, as anybody would.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from steps.once import Once

from demo_pipeline.corpus import build_cloze, build_corpus
from demo_pipeline.sizes import Size
from megahead.config.loading import load_config
from megahead.config.objective import HeadName
from megahead.data.preprocess import preprocess
from megahead.data.train_tokenizer import sample_texts, save_tokenizer, train_bpe
from megahead.data.writer import Bar
from megahead.errors import UserError
from megahead.evaluate.generation import continuation, sampling_options
from megahead.evaluate.harness import evaluate_harness
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import export
from megahead.hf.published import load_causal, load_tokenizer_folder
from megahead.report.figures import draw_curves, save_figure
from megahead.report.read import read_metrics
from megahead.report.tables import to_rich
from megahead.run_folder import RunFolder
from megahead.wording import duration


def launcher(ranks: int) -> list[str]:
    """What python is given before the script's own words, on a free port: the launcher's own may be taken by another
    demo, say."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return ["-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks), "--master_port", port]


def environment() -> dict[str, str]:
    """Of the launcher; how its ranks share the cores is the command's own affair."""
    added = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    return {**os.environ, **added, "PYTHONUNBUFFERED": "1"}


ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER_NOTE = re.compile(r"^\[\d{4}-\d\d-\d\d .*\[(INFO|WARNING)\]")
RANKS = min(2, torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1)


def train(config: str, overrides: Sequence[str], console: Console) -> None:
    """Trains `configs/CONFIG.yaml`, resuming what an earlier call began.

    Raises UserError with the last lines it printed when it fails.
    """
    command = [sys.executable, *launcher(RANKS), "launch/pretrain.py", "--config", f"configs/{config}.yaml"]
    command += [word for override in overrides for word in ("--set", override)]
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in map(str.rstrip, process.stdout):
            if line and not _LAUNCHER_NOTE.match(line):
                lines.append(line)
                console.print(f"  {line}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if process.returncode:
        raise UserError("training must end by itself, but failed; its last lines:\n" + "\n".join(lines[-15:]))


def seconds_per_step(config: str, overrides: Sequence[str], console: Console) -> float:
    """Measured over a few steps of a run that is thrown away."""
    trial = ["training.steps=16", "training.log_seconds=0", "schedule.warmup_steps=0", "data.validation=null"]
    scratch = load_config(f"configs/{config}.yaml", overrides).folder()
    train(config, [*overrides, *trial], console)
    steps: list[float] = [record["step_seconds"] for record in read_metrics(scratch.path).training]
    shutil.rmtree(scratch)
    return sorted(steps)[len(steps) // 2]


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
        with Bar("Reading") as bar:
            texts = sample_texts([text], max_bytes=self.size.tokenizer_bytes, progress=bar)
            tokenizer = train_bpe(texts, vocab_size)
        save_tokenizer(tokenizer, self.tokenizer)
        return f"byte-level BPE, {tokenizer.get_vocab_size():,} ids"

    def _index(self) -> str:
        self.data.mkdir(parents=True, exist_ok=True)
        reports = []
        for half in ("train", "held_out"):
            with Bar(f"Tokenizing {half}") as bar:
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
        headless = load_config("configs/demo-headless.yaml", self.settings("headless"))
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
        config = load_config(f"configs/demo-{name}.yaml", overrides).model_dump(mode="json")
        settings, checkpoints = {"run": config, "ranks": RANKS}, RunFolder(run).checkpoints

        def work() -> str:
            train(f"demo-{name}", overrides, self.console)
            metrics = read_metrics(run)
            tokens, perplexity = metrics.training[-1]["tokens"], metrics.validation[-1]["perplexity"]
            return f"{tokens:,} tokens, held-out perplexity {perplexity:,.0f}"

        read = [self.text.data, *inputs]
        self.stages.run(f"train {name}", work, settings=settings, inputs=read, outputs=[checkpoints])

    def _train_vanilla(self) -> None:
        """As many steps as fit in the time that the headless run took, its schedule fitted to them."""
        seconds = read_metrics(self.folder / "runs/headless").training[-1]["seconds"]
        found, scratch = self.folder / "stages/vanilla-steps.txt", self.folder / "runs/vanilla-trial"

        def work() -> str:
            settings = self.settings("vanilla", f"output_dir={scratch}")
            step_seconds = seconds_per_step("demo-vanilla", settings, self.console)
            found.write_text(str(max(20, int(seconds / step_seconds))))
            return f"{step_seconds:.2f} s a step"

        self.stages.run("time vanilla", work, settings={"seconds": seconds}, outputs=[found])
        steps = int(found.read_text())
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
    console.print(speak(folder / "models/head-trained"), markup=False)
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
    table.add_column("time", footer=duration(spent), justify="right")
    table.add_column("result")
    for stage in stages.finished:
        table.add_row(stage.name, "reused" if stage.reused else duration(stage.seconds), escape(stage.result))
    return table


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
