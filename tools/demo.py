"""From the text on this machine to a speaking headless model, in one command: `make demo`.

Corpus, tokenizer, index, pretraining, head, export, evaluation, a paragraph, a plot. All of it lies in demo/;
a second call reuses what is finished and resumes what is not.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from demo.cloze import build_cloze
from demo.corpus import build_corpus
from demo.stages import Stages, duration
from demo.training import ROOT, ranks, seconds_a_step, train
from generate import continuation, sampling_options
from megahead.config import load_config
from megahead.convert import export, load_causal, load_tokenizer_folder
from megahead.convert.heads import HeadName
from megahead.data import Bar, preprocess
from megahead.data.vocabulary import sample_texts, save_tokenizer, train_bpe
from megahead.errors import run_command
from megahead.evaluate.harness import evaluate_harness
from megahead.evaluate.offline import evaluate_checkpoint
from megahead.report import read_metrics, save_curves, to_rich

FOLDER = ROOT / "demo"
TOKENIZER_BYTES = 20_000_000
PROMPT = "Return a new array"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and evaluate a small headless model on text from this machine.")
    parser.add_argument("--with-vanilla", action="store_true", help="also train the vanilla twin for the same time")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override settings of every run")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    Demo(Console(highlight=False), arguments.set).run(arguments.with_vanilla)


class Demo:
    """The stages, each resting on files of the ones before."""

    def __init__(self, console: Console, overrides: list[str]) -> None:
        self.console = console
        self.overrides = overrides
        self.stages = Stages(FOLDER / "stages", console)
        self.corpus = FOLDER / "corpus"
        self.tokenizer = FOLDER / "tokenizer.json"
        self.cloze = FOLDER / "cloze.jsonl"
        self.rows: list[dict[str, Any]] = []

    def run(self, with_vanilla: bool) -> None:
        self._text()
        self._train("headless")
        self._train("head", inputs=[FOLDER / "runs/headless/checkpoints/latest"])
        models: list[tuple[str, str, HeadName]] = [
            ("tied head", "headless", "tied"),
            ("pmi head", "headless", "pmi"),
            ("trained head", "head", "trained"),
        ]
        if with_vanilla:
            self._train_vanilla()
            models.append(("vanilla twin", "vanilla", "trained"))
        for title, name, head in models:
            self._evaluate(title, name, head)
        self._show([name for name in ("headless", "head", "vanilla") if name != "vanilla" or with_vanilla])

    def _text(self) -> None:
        files = [self.corpus / "train.jsonl", self.corpus / "held_out.jsonl"]
        self.stages.run("corpus", lambda: build_corpus(self.corpus, console=self.console).summary(), outputs=files)
        self.stages.run("tokenizer", self._train_tokenizer, inputs=files[:1], outputs=[self.tokenizer])
        data = FOLDER / "data"
        self.stages.run("index", self._index, inputs=[*files, self.tokenizer], outputs=[data])
        self.stages.run(
            "cloze",
            lambda: f"{build_cloze(files[1], self.cloze)} passages whose last word is to be guessed",
            inputs=files[1:],
            outputs=[self.cloze],
        )

    def _train_tokenizer(self) -> str:
        vocab_size = load_config("configs/demo-headless.yaml", self.overrides).model.vocab_size
        with Bar("Reading") as bar:
            texts = sample_texts([self.corpus / "train.jsonl"], max_bytes=TOKENIZER_BYTES, progress=bar)
            tokenizer = train_bpe(texts, vocab_size)
        save_tokenizer(tokenizer, self.tokenizer)
        return f"byte-level BPE, {tokenizer.get_vocab_size():,} ids"

    def _index(self) -> str:
        (FOLDER / "data").mkdir(parents=True, exist_ok=True)
        reports = []
        for split in ("train", "held_out"):
            with Bar(f"Tokenizing {split}") as bar:
                source, target = self.corpus / f"{split}.jsonl", FOLDER / "data" / split
                reports.append(preprocess([source], self.tokenizer, target, progress=bar))
        train_tokens, held_tokens = (report.tokens for report in reports)
        bytes_each = sum(report.text_bytes for report in reports) / (train_tokens + held_tokens)
        return f"{train_tokens:,} tokens and {held_tokens:,} held out, {bytes_each:.2f} bytes a token"

    def _train(self, name: str, extra: tuple[str, ...] = (), inputs: list[Path] | None = None) -> None:
        config, overrides = f"demo-{name}", [*self.overrides, *extra]
        settings = load_config(f"configs/{config}.yaml", overrides).model_dump(mode="json")
        self.stages.run(
            f"train {name}",
            lambda: self._summary(train(config, overrides, self.console)),
            settings={"run": settings, "ranks": ranks()},
            inputs=[FOLDER / "data", *(inputs or [])],
            outputs=[FOLDER / "runs" / name / "checkpoints"],
        )

    def _train_vanilla(self) -> None:
        """As many steps as fit in the time that the headless run took, its schedule fitted to them."""
        seconds = read_metrics(FOLDER / "runs/headless").training[-1]["seconds"]
        probe = FOLDER / "stages/vanilla-steps.txt"

        def measure() -> str:
            scratch = FOLDER / "runs/vanilla-probe"
            step_seconds = seconds_a_step("demo-vanilla", self.overrides, scratch, self.console)
            probe.write_text(str(max(20, int(seconds / step_seconds))))
            return f"{step_seconds:.2f} s a step"

        self.stages.run("time vanilla", measure, settings={"seconds": seconds}, outputs=[probe])
        steps = int(probe.read_text())
        self._train("vanilla", (f"training.steps={steps}", f"training.evaluate_every={max(1, steps // 8)}"))

    def _summary(self, run: Path) -> str:
        metrics = read_metrics(run)
        last, held_out = metrics.training[-1], metrics.validation[-1]
        return f"{last['tokens']:,} tokens, held-out perplexity {held_out['perplexity']:,.0f}"

    def _evaluate(self, title: str, name: str, head: HeadName) -> None:
        """Exports the run with a head, asks lm-eval, and adds a row to the table."""
        run, folder = FOLDER / "runs" / name, FOLDER / "models" / f"{name}-{head}"
        latest = run / "checkpoints/latest"

        def to_hugging_face() -> str:
            report = export(run, folder, head)
            return f"{folder.relative_to(ROOT)}, logits equal within {max(report.parity.largest_error.values()):.1e}"

        self.stages.run(f"export {name} {head}", to_hugging_face, inputs=[latest], outputs=[folder])
        scores = FOLDER / "scores" / f"{name}-{head}.json"
        self.stages.run(
            f"evaluate {name} {head}",
            lambda: self._score(run, folder, head, scores),
            inputs=[latest, folder, self.cloze],
            outputs=[scores],
        )
        self.rows.append({"model": title, **_read(scores), **_training_cost(run)})
        _write(FOLDER / "results.json", self.rows)

    def _score(self, run: Path, folder: Path, head: HeadName, output: Path) -> str:
        held_out = evaluate_checkpoint(run, head)
        (cloze,) = evaluate_harness(folder, {"cloze": self.cloze}, batch_size=16).tasks
        accuracy = next(score for score in cloze.scores if score.metric == "acc")
        _write(
            output,
            {
                "perplexity": held_out.perplexity,
                "bits_per_byte": held_out.bits_per_byte,
                "next_token": held_out.accuracy,
                "cloze": accuracy.value,
                "cloze_stderr": accuracy.stderr,
            },
        )
        return f"perplexity {held_out.perplexity:,.1f}, last word {accuracy.value:.1%}"

    def _show(self, runs: list[str]) -> None:
        picture = save_curves([read_metrics(FOLDER / "runs" / name) for name in runs], FOLDER / "curves.png")
        self.console.rule("what it says")
        self._speak(FOLDER / "models/head-trained")
        self.console.rule("held-out text")
        self.console.print(to_rich([_shown(row) for row in self.rows]))
        tied, pmi, trained = (row["perplexity"] for row in self.rows[:3])
        self.console.print(
            f"pmi against tied head: {pmi / tied:.2f} of its perplexity; against the fine-tuned head: ", end=""
        )
        self.console.print(f"{pmi / trained:.2f}")
        self.console.rule("time")
        self.console.print(self.stages.table())
        self.console.print(f"curves   {picture.relative_to(ROOT)}")
        self.console.print("table    demo/results.json")
        self.console.print("models   demo/models (Hugging Face folders)")
        self.console.print("runs     demo/runs (tensorboard --logdir demo/runs)")

    def _speak(self, folder: Path) -> None:
        torch.manual_seed(0)
        sampling = sampling_options(temperature=0.7, top_k=40, top_p=0.95)
        text = continuation(load_causal(folder), load_tokenizer_folder(folder), PROMPT, 100, sampling)
        self.console.print(PROMPT, style="bold", end="")
        self.console.print(text, markup=False)


def _training_cost(run: Path) -> dict[str, float]:
    last = read_metrics(run).training[-1]
    return {"tokens": last["tokens"], "seconds": last["seconds"], "tokens_per_second": last["tokens"] / last["seconds"]}


def _shown(row: dict[str, Any]) -> dict[str, object]:
    """A row as narrow as a terminal."""
    return {
        "model": row["model"],
        "perplexity": row["perplexity"],
        "bits/byte": row["bits_per_byte"],
        "next token": f"{row['next_token']:.1%}",
        "last word": f"{row['cloze']:.1%} ± {row['cloze_stderr']:.1%}",
        "tokens/s": round(row["tokens_per_second"]),
        "trained": duration(row["seconds"]),
    }


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
