"""Sequences of items: headless against a full softmax, tied and untied, and two models of the library RecTools.

Each side (an objective, or a model of RecTools) is trained with every recipe on the first seed, and with that of best
validation NDCG@10 on all seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from experiments.item_rivals import METRICS, RIVALS, best_recipe_on_all_seeds, score_row
from experiments.measures import Row, aggregate_seeds, time_spent
from experiments.runner import GRIDS, ROOT, ExperimentRunner, select_names, to_overrides, training_overrides
from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.errors import DataError, FieldError, UserError
from megahead.evaluate.next_item import next_item
from megahead.hf.export import ensure_hf_folder


def compare_items(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains all sides (or those of `only`) on the table that --text names, for the grid's epochs or --minutes. After
    each side, records every run of the chosen recipes, and means over seeds of the test's HR@10, NDCG@10 and MRR among
    unseen items. RecTools' models are trained by epochs alone."""
    grid, rows = GRIDS["items"], list[Row]()
    select_names(only, [*grid["sides"], *RIVALS])
    if runner.minutes is not None and set(only) & set(RIVALS):
        raise FieldError("--minutes", f"be left out with {' and '.join(RIVALS)}, trained by epochs", got=runner.minutes)
    table = _Table.prepare(runner)
    for side in grid["sides"]:
        if not only or side in only:
            rows += best_recipe_on_all_seeds(side, grid["recipes"], grid["seeds"], partial(table.scores, side))
            _record(runner, rows)
    rivals = [rival for rival in RIVALS if not only or rival in only]
    if rivals and runner.minutes is None:
        rows += _train_rivals(runner, table, rivals)
        _record(runner, rows)


def _record(runner: ExperimentRunner, rows: Sequence[Row]) -> None:
    runner.record("items-runs", rows)
    columns = ("model", "dropout", "rate")
    runner.record("items", aggregate_seeds(rows, columns, ["validation NDCG@10", *METRICS, "CPU s"]))


@dataclass(frozen=True)
class _Table:
    """A table's datasets, and the runs on them."""

    runner: ExperimentRunner
    prefix: Path
    num_ids: int
    num_users: int
    steps_an_epoch: int
    config: RunConfig

    @classmethod
    def prepare(cls, runner: ExperimentRunner) -> _Table:
        prefix, (user, item, time) = runner.folder / "table" / "items", runner.columns
        options = ["--table", runner.require_text(), "--user", user, "--item", item, "--time", time]
        runner.make(prefix.with_suffix(".idx"), "preprocess.py", *options, output=prefix)
        info = IndexedDataset(prefix).info
        if info is None:
            raise DataError(f"`{prefix}.json` must have the number of ids, but is missing.")
        config = load_config(f"configs/{GRIDS['items']['config']}.yaml", runner.settings)
        steps = ceil(info.tokens / (config.batch.global_size * config.data.sequence_length))
        return cls(runner, prefix, info.vocab_size, info.documents, steps, config)

    def scores(self, side: str, recipe: Mapping[str, float], seed: int) -> Row:
        """Trains an objective with a recipe and seed; returns its scores on the validation and the test items."""
        name = f"{side}-{recipe['dropout']}-{recipe['rate']}-{seed}"
        config, settings = GRIDS["items"]["config"], self._settings(side, recipe, seed)
        run = self.runner.train(config, name, *settings, *training_overrides(self._steps(config, side)))
        folder = ensure_hf_folder(self.runner.folder / name)
        files = (self.prefix.with_name(f"{self.prefix.name}-{part}.idx") for part in ("validation", "test"))
        validation, test = (next_item(folder, file).scores for file in files)
        return score_row(validation, test, time_spent(run))

    def _steps(self, config: str, side: str) -> int:
        grid = GRIDS["items"]
        if self.runner.minutes is None:
            return int(grid["epochs"] * self.steps_an_epoch)
        # with any recipe, since none changes the cost of a step
        settings = self._settings(side, grid["recipes"][0], grid["seeds"][0])
        return self.runner.steps_within(self.runner.minutes, config, side, *settings)

    def _settings(self, side: str, recipe: Mapping[str, float], seed: int) -> list[str]:
        prefix, dropout = self.prefix, recipe["dropout"]
        settings: dict[str, Any] = {"seed": seed, "model.vocab_size": self.num_ids, "tasks": "null"}
        settings |= {"data.train": prefix, "data.validation": f"{prefix}-validation"}
        settings |= {"model.hidden_dropout": dropout, "model.attention_dropout": dropout}
        settings |= {"optimizer.learning_rate": recipe["rate"]}
        return [*to_overrides(settings), *GRIDS["items"]["sides"][side]]


def _train_rivals(runner: ExperimentRunner, table: _Table, models: Sequence[str]) -> list[Row]:
    """The rows of the rivals' best recipes, trained by `runner.rivals_python`; none where that lacks RecTools."""
    python = str(runner.rivals_python or sys.executable)
    check = [python, "-c", "import rectools.models.nn.transformers.sasrec"]
    if subprocess.run(check, capture_output=True).returncode:
        runner.console.print(f"left out: {' and '.join(models)}; {python} has no rectools[torch]", soft_wrap=True)
        return []
    grid, plan_file, log = GRIDS["items"], runner.folder / "rivals.json", runner.folder / "rivals.log"
    plan = {"models": models, "recipes": grid["recipes"], "seeds": grid["seeds"], "prefix": str(table.prefix)}
    plan["num_ids"] = table.num_ids
    # the shape of ours, as many epochs, and as many steps in each
    model, length = table.config.model, table.config.data.sequence_length
    settings = {"n_blocks": model.num_layers, "n_factors": model.hidden_size, "n_heads": model.num_heads}
    batch = ceil(table.num_users / table.steps_an_epoch)
    plan["settings"] = settings | {"epochs": grid["epochs"], "batch_size": batch, "session_max_len": length}
    plan["data"] = IndexedDataset(table.prefix).fingerprint
    plan_file.write_text(json.dumps(plan, indent=1) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tools")))}  # this checkout's
    with log.open("a") as output:
        command = [python, "-m", "experiments.item_rivals", str(plan_file)]
        code = subprocess.run(command, cwd=ROOT / "tools", env=environment, stdout=output, stderr=output).returncode
    if code:
        raise UserError(f"training {' and '.join(models)} must come to its end, but failed; see {log}.")
    rows: list[Row] = json.loads(plan_file.with_name("rivals-rows.json").read_text())
    return rows
