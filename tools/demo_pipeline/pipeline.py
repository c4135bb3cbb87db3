"""The demo's stages, each resting on files of the ones before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from demo_pipeline.sizes import FULL, Size
from demo_pipeline.stages import Stages
from demo_pipeline.text import Text
from demo_pipeline.training import ranks, seconds_per_step, train
from megahead.config.loading import load_config
from megahead.config.objective import HeadName
from megahead.evaluate.harness import evaluate_harness
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import export
from megahead.report.read import read_metrics
from megahead.run_folder import RunFolder


class Pipeline:
    """Everything happens in `folder`; `roots` are searched for documentation (default: all that is installed).

    `overrides` are `a.b=c`, for every run, and count before what `size` says.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        *,
        size: Size = FULL,
        overrides: Sequence[str] = (),
        roots: Sequence[Path] = (),
    ) -> None:
        self.folder, self.console, self.size, self.overrides = folder, console, size, overrides
        self.stages = Stages(folder / "stages", console)
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
        models: list[tuple[str, str, HeadName]] = [
            ("tied head", "headless", "tied"),
            ("pmi head", "headless", "pmi"),
            ("trained head", "head", "trained"),
        ]
        if with_vanilla:
            self._train_vanilla()
            models.append(("vanilla twin", "vanilla", "trained"))
        rows = [{"model": title, "run": name, **self._evaluate(name, head)} for title, name, head in models]
        _write(self.folder / "results.json", rows)
        return rows

    def _train(self, name: str, extra: Sequence[str] = (), inputs: Sequence[Path] = ()) -> None:
        run = self.folder / "runs" / name
        overrides = self.settings(name, *extra)
        settings = load_config(f"configs/demo-{name}.yaml", overrides).model_dump(mode="json")

        def work() -> str:
            train(f"demo-{name}", overrides, self.console)
            metrics = read_metrics(run)
            tokens, perplexity = metrics.training[-1]["tokens"], metrics.validation[-1]["perplexity"]
            return f"{tokens:,} tokens, held-out perplexity {perplexity:,.0f}"

        self.stages.run(
            f"train {name}",
            work,
            settings={"run": settings, "ranks": ranks()},
            inputs=[self.text.data, *inputs],
            outputs=[RunFolder(run).checkpoints],
        )

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
        self.stages.run(
            f"evaluate {name} {head}",
            lambda: self._score(run, model, head, scores),
            inputs=[latest, model, self.text.cloze],
            outputs=[scores],
        )
        last = read_metrics(run).training[-1]
        cost = {"seconds": last["seconds"], "tokens": last["tokens"]}
        return {**json.loads(scores.read_text(encoding="utf-8")), **cost}

    def _score(self, run: Path, model: Path, head: HeadName, output: Path) -> str:
        held_out = evaluate_checkpoint(run, head)
        (cloze,) = evaluate_harness(model, {"cloze": self.text.cloze}, batch_size=16).tasks
        accuracy = next(score for score in cloze.scores if score.metric == "acc")
        figures = {
            "perplexity": held_out.perplexity,
            "bits_per_byte": held_out.bits_per_byte,
            "next_token": held_out.accuracy,
            "last_word": accuracy.value,
            "last_word_stderr": accuracy.stderr,
        }
        _write(output, figures)
        return f"perplexity {held_out.perplexity:,.1f}, last word {accuracy.value:.1%}"


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
