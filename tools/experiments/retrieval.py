"""RetroMAE, DupMAE and TSDAE beside plain masking, headless and with a softmax: how well their vectors retrieve
articles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from demo_pipeline.corpus import write_jsonl
from experiments.measures import Row, aggregate_seeds
from experiments.runner import GRIDS, ExperimentRunner, grid_points, select_names, training_overrides
from megahead.data.compression import read_blocks
from megahead.evaluate.harness_tasks import read_articles
from steps.once import output_lock

GRID = GRIDS["retrieval"]
SHARE = 10  # one article in ten serves to choose learning rates, another for final scores
SEARCHES = ("title", "sentence")


class Way(NamedTuple):
    """An encoder's pretraining method (`rule` in grids.yaml: retromae, dupmae, tsdae or masking), and its objective."""

    rule: str
    objective: str

    def __str__(self) -> str:
        return f"{self.rule}-{self.objective}"

    @property
    def pooling(self) -> str:
        """The pooling that the method trains; for masking, which trains none, the one with better scores."""
        return "mean" if self.rule == "masking" else "cls"


def compare_retrieval(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains each way (or those of `only`) with every rate and the first seed, then with its best rate and all seeds:
    for equal tokens, and for the time that RetroMAE with a softmax takes. Scores all before and after tuning on pairs
    of a title and its article. Records results after each way.

    --text: JSON lines with `title` and `text`; --tasks-data: with STS-B; --tokenizer: in place of one of the text.
    """
    ways = {Way(**values): overrides for values, overrides in grid_points({"axes": GRID["ways"]}, {})}
    (selected,) = select_names(only, ways)
    comparison = Comparison.prepare(runner)
    longest = comparison.step_seconds(Way("retromae", "vanilla"), ways[Way("retromae", "vanilla")])
    rows = list[Row]()
    for way in selected:
        overrides = ways[way]
        rate = comparison.best_rate(way, overrides)
        rows += comparison.rows(way, [*overrides, rate], GRID["steps"], "tokens")
        steps = round(GRID["steps"] * longest / comparison.step_seconds(way, overrides))
        if steps > GRID["steps"]:
            rows += comparison.rows(way, [*overrides, rate], steps, "time")
        runner.record("retrieval-runs", rows)
        scores = [name for name, value in rows[0].items() if isinstance(value, float)]
        runner.record("retrieval", aggregate_seeds(rows, ("way", "equal", "rate", "steps"), scores))


@dataclass(frozen=True)
class Comparison:
    """Trains encoders on a part of the articles; `validation_articles` selects rates, `test_articles` gives scores."""

    runner: ExperimentRunner
    data: Sequence[str]
    pairs: Path
    validation_articles: Path
    test_articles: Path

    @staticmethod
    def prepare(runner: ExperimentRunner) -> Comparison:
        """Splits the articles into three files, once, and tokenizes the first."""
        folder = runner.folder / "articles"
        train, validation, test, pairs = (folder / f"{n}.jsonl" for n in ("train", "choose", "search", "pairs"))
        with output_lock(folder):
            if not pairs.exists():
                text = b"".join(block for block, _ in read_blocks(runner.require_text()))
                articles = [json.loads(line) for line in text.splitlines()]
                write_jsonl(train, (article for i, article in enumerate(articles) if i % SHARE > 1))
                write_jsonl(validation, articles[::SHARE])
                write_jsonl(test, articles[1::SHARE])
                found = read_articles(train, None)  # `rest`: the text without its title and first sentence
                write_jsonl(pairs, ({"query": one["title"], "positive": one["rest"]} for one in found))
        runs = replace(runner, folder=runner.folder / "runs", text=train)
        if runner.tokenizer is None:
            data = runs.data(GRID["vocabulary"], encoder=True)
        else:
            data = runs.data_with_tokenizer(runner.tokenizer, encoder=True)
        return Comparison(runs, data, pairs, validation, test)

    def step_seconds(self, way: Way, overrides: Sequence[str]) -> float:
        """CPU time of a step."""
        return self.runner.step_seconds(GRID["config"], str(way), *self.data, *overrides)

    def best_rate(self, way: Way, overrides: Sequence[str]) -> str:
        """The override of the learning rate that finds most articles by their titles."""

        def found(rate: str) -> float:
            run = self._train(way, [*overrides, rate], GRID["steps"], GRID["seeds"][0])
            return float(self._scores(run, self.validation_articles)[f"title_{way.pooling}_recall@10"])

        return max((f"optimizer.learning_rate={rate}" for rate in GRID["rates"]), key=found)

    def rows(self, way: Way, overrides: Sequence[str], steps: int, equal: str) -> list[Row]:
        """A row of scores for each seed, before tuning and after it."""
        rows, rate = list[Row](), overrides[-1].partition("=")[2]
        for seed in GRID["seeds"]:
            run = self._train(way, overrides, steps, seed)
            row: Row = {"way": str(way), "equal": equal, "rate": rate, "steps": steps, "seed": seed}
            scores = self._scores(run, self.test_articles)
            tuned = self._scores(self._tune(run, way), self.test_articles)
            row |= {name: float(value) for name, value in scores.items()}
            rows.append(row | {f"tuned: {name}": float(tuned[name]) for name in scores if f"_{way.pooling}" in name})
        return rows

    def _train(self, way: Way, overrides: Sequence[str], steps: int, seed: int) -> Path:
        name = f"{way}-{overrides[-1].partition('=')[2]}-{steps}-{seed}"
        settings = [*self.data, *overrides, f"seed={seed}", *training_overrides(steps)]
        self.runner.train(GRID["config"], name, *settings)
        return self.runner.folder / name

    def _tune(self, run: Path, way: Way) -> Path:
        """The folder of the encoder tuned on the pairs."""
        tuned = run / "tuned"
        with output_lock(tuned):
            if not tuned.exists():
                outputs = ["--output", run / "tuning.json", "--save", tuned]
                options = ["--pooling", way.pooling, *GRID["tuning"], "--seeds", "1", *outputs]
                self.runner.run("finetune.py", "--model", run, "--task", f"retrieval/{self.pairs}", *options)
        return tuned

    def _scores(self, model: Path, articles: Path) -> Row:
        """recall@10 by title and by sentence, and STS-B's correlation if its data is given, with both poolings."""
        data, names = self.runner.tasks_data, ["retrieval"]
        names += [] if data is None else ["stsb"]
        output = "-".join([articles.stem, *model.relative_to(self.runner.folder).parts])  # one for each process
        results = self.runner.score(output, ",".join(names), None, data, [model], articles=articles)
        values = {score.metric: score.value for result in results[model] for score in result.scores}
        kept = [f"{query}_{pooling}_recall@10" for query in SEARCHES for pooling in ("cls", "mean")]
        return {name: values[name] for name in [*kept, "spearman_cls", "spearman_mean"] if name in values}
