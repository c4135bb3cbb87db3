"""SASRec and BERT4Rec of the library RecTools, on the sequences and with the metrics of `next_item`.

`python -m experiments.item_rivals PLAN.json`, by an interpreter that has rectools[torch]; experiments.items writes the
plan. A second call trains what the first one did not finish.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from megahead.data.indexed import IndexedDataset
from megahead.data.item_sequences import END_ID, read_sequences
from megahead.evaluate.next_item import rank_next_items, summarize
from megahead.evaluate.results import ResultCache, Score

RIVALS = "SASRec", "BERT4Rec"
METRICS = {"HR@10": "hr@10_unseen", "NDCG@10": "ndcg@10_unseen", "MRR": "mrr_unseen"}
"""Scores of `next_item` by column."""

Recipe = Mapping[str, float]
Row = dict[str, Any]


def best_recipe_on_all_seeds(
    model: str, recipes: Sequence[Recipe], seeds: Sequence[int], train: Callable[[Recipe, int], Row]
) -> list[Row]:
    """Trains every recipe on the first seed, and that of best validation NDCG@10 on all; returns its rows."""
    first = [train(recipe, seeds[0]) for recipe in recipes]
    best = max(range(len(recipes)), key=lambda index: first[index]["validation NDCG@10"])
    rows = [first[best], *(train(recipes[best], seed) for seed in seeds[1:])]
    return [{"model": model, **recipes[best], "seed": seed, **row} for seed, row in zip(seeds, rows, strict=True)]


def score_row(validation: Sequence[Score], test: Sequence[Score], seconds: float) -> Row:
    """A run's columns, from its scores on both held-out items."""
    held_out, scores = ({score.metric: score.value for score in part} for part in (validation, test))
    row = {column: scores[metric] for column, metric in METRICS.items()}
    return {"validation NDCG@10": held_out[METRICS["NDCG@10"]]} | row | {"CPU s": seconds}


def main() -> None:
    """Trains the plan's models and writes the rows of their best recipes beside it."""
    plan_file = Path(sys.argv[1])
    plan = json.loads(plan_file.read_text())
    cache, rows = ResultCache(plan_file.with_name("rivals-runs.json")), list[Row]()
    for model in plan["models"]:

        def train(recipe: Recipe, seed: int, model: str = model) -> Row:
            key = {"model": model, **recipe, "seed": seed, "data": plan["data"], "settings": plan["settings"]}
            found = cache.find(key)
            row = found["row"] if found else _train(plan, model, recipe, seed)
            cache.add(key, {"row": row}, replaces=[*key])
            return dict(row)

        rows += best_recipe_on_all_seeds(model, plan["recipes"], plan["seeds"], train)
    plan_file.with_name("rivals-rows.json").write_text(json.dumps(rows))


def _train(plan: Mapping[str, Any], name: str, recipe: Recipe, seed: int) -> Row:
    """Trains a model on the users' first items, and scores it on both held-out ones."""
    from pytorch_lightning import seed_everything
    from rectools.models import BERT4RecModel, SASRecModel

    seed_everything(seed)
    model_class = {"SASRec": SASRecModel, "BERT4Rec": BERT4RecModel}[name]
    model = model_class(dropout_rate=recipe["dropout"], lr=recipe["rate"], **plan["settings"])
    events, start = _events(plan["prefix"]), process_time()
    model.fit(events)
    seconds = process_time() - start
    files = (Path(f"{plan['prefix']}-{part}.idx") for part in ("validation", "test"))
    validation, test = (_scores(model, file, plan["num_ids"]) for file in files)
    return score_row(validation, test, seconds)


def _events(prefix: str) -> Any:
    """The training sequences as RecTools' dataset; an item's place in its sequence stands for the time."""
    import pandas as pd
    from rectools import Columns
    from rectools.dataset import Dataset

    dataset = IndexedDataset(prefix)
    documents = [dataset.document(number) for number in range(dataset.num_documents)]
    sequences = [ids[ids != END_ID].astype(int) for ids in documents]
    users = np.repeat(np.arange(len(sequences)), [*map(len, sequences)])
    times = pd.to_datetime(np.concatenate([np.arange(len(ids)) for ids in sequences]), unit="s")
    columns = {Columns.User: users, Columns.Item: np.concatenate(sequences), Columns.Datetime: times}
    return Dataset.construct(pd.DataFrame(columns | {Columns.Weight: 1.0}))


@torch.inference_mode()
def _scores(model: Any, file: Path, num_ids: int) -> list[Score]:
    """The scores of `next_item`; items without training events come last."""
    sequences, backbone, preparator = read_sequences(file), model.torch_model.eval(), model.data_preparator
    embeddings_ND = backbone.item_model.get_all_embeddings()  # RecTools' own numbering
    known = [int(item) for item in preparator.get_known_item_ids()]
    own_ids = dict(zip(known, preparator.get_known_items_sorted_internal_ids().tolist(), strict=True))
    vectors_ND = embeddings_ND.new_zeros(num_ids, embeddings_ND.shape[1] + 1)
    vectors_ND[:, -1] = -torch.inf  # a bias
    vectors_ND[known] = pad(embeddings_ND[list(own_ids.values())], (0, 1))
    rankings = []
    for start in range(0, len(sequences), 128):
        batch = sequences[start : start + 128]
        histories = [[own_ids[item] for item in ids[:-1].tolist() if item in own_ids] for ids in batch]
        inputs = preparator._collate_fn_recommend([(history, None, None) for history in histories])
        contexts_UD = pad(backbone.encode_sessions(inputs, embeddings_ND)[:, -1], (0, 1), value=1.0)
        rankings.append(rank_next_items(vectors_ND, contexts_UD, batch, num_ids))
    return summarize(rankings, num_ids - 1)


if __name__ == "__main__":
    main()
