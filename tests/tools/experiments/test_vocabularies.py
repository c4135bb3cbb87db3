"""Large and other vocabularies, and a language of facts, in tiny."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.bottleneck import compare_bottleneck, write_language
from experiments.runner import GRIDS, ExperimentRunner, run_name
from experiments.vocabularies import compare_large_vocabularies
from megahead.config.loading import load_config
from megahead.data.indexed import IndexedDataset
from support.runner import TINY, results


def test_large_vocabularies_are_scored_by_language(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"SIZES": (300, 420), "STEPS": 4, "VANILLA_SIZES": (300,), "SHORT_STEPS": 2, "HELD_OUT_BYTES": 2_000}
    for name, value in sizes.items():
        monkeypatch.setattr(f"experiments.vocabularies.{name}", value)
    texts = [json.loads(line) for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    languages = ("de", "sw")
    given = [text | {"lang": languages[place % 2]} for place, text in enumerate(texts)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in given))
    settings = [part for part in TINY if not part.startswith(("training.", "data."))] + ["batch.micro_size=8"]
    compare_large_vocabularies(replace(runner, settings=[*settings, "data.sequence_length=16"]), [])
    rows = results(runner, "large_vocabularies")
    assert [(row["vocabulary"], row["at equal"]) for row in rows] == [
        (size, equal) for size in (300, 420) for equal in ("text", "time")
    ]
    assert [row["steps"] for row in rows[:2]] == [4, 4]
    assert rows[2]["steps"] < rows[3]["steps"] == 4
    assert rows[2]["MB of text"] == pytest.approx(rows[0]["MB of text"], rel=0.2)
    by_language = json.loads((runner.folder / "headless-420/held-out-4.json").read_text())
    assert [*by_language] == ["de", "sw"]
    assert sum(by_language.values()) / 2 == pytest.approx(rows[3]["bits per byte"])
    vanilla, equal_text, equal_time = results(runner, "large_vocabularies-vanilla")
    assert [row["objective"] for row in (vanilla, equal_text, equal_time)] == ["vanilla", "headless", "headless"]
    assert vanilla["steps"] == equal_text["steps"] == max(1, round(4 / vanilla["times headless"]))
    assert (equal_time["steps"], equal_time["bits per byte"]) == (4, rows[1]["bits per byte"])
    split = tmp_path / "languages"
    trained, held = ({*(split / f"{name}.jsonl").read_text().splitlines()} for name in ("train", "de"))
    assert held
    assert not trained & held


def test_large_sizes_name_runs_too() -> None:
    name = run_name("32,768 ids-headless-table")
    assert load_config("configs/small-headless.yaml", [f"name={name}"]).name == "32768-ids-headless-table"


def test_who_learns_a_language_of_facts(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 4, "HELD_OUT": 3}.items():
        monkeypatch.setattr(f"experiments.bottleneck.{name}", value)
    for name, values in {"ids": [64], "rate": [1e-3, 1.6e-2]}.items():
        monkeypatch.setitem(GRIDS["bottleneck"]["axes"][name], "values", values)
    small = ["schedule.warmup_steps=1", "model.num_layers=1", "model.hidden_size=16"]
    small += ["batch.global_size=4", "batch.micro_size=4"]
    compare_bottleneck(replace(runner, text=None, settings=small), [])
    tried = results(runner, "bottleneck-rates")
    best = results(runner, "bottleneck")
    assert [(row["objective"], row["rate"]) for row in tried] == [
        (objective, rate) for objective in GRIDS["bottleneck"]["axes"]["objective"] for rate in (1e-3, 1.6e-2)
    ]
    knows = [(row["facts known"], -row["loss"]) for row in tried]
    assert [tried.index(row) for row in best] == [max(k, k + 1, key=knows.__getitem__) for k in (0, 2, 4)]
    assert all(0 < row["gradient_share"] <= 1 for row in best)


def test_the_language_walks_along_cycles_of_a_permutation(tmp_path: Path) -> None:
    texts = IndexedDataset(write_language(tmp_path, 128) / "held-out")
    successor: dict[int, int] = {}
    for document in map(texts.document, range(100)):
        *symbols, end = document.tolist()
        assert end == 0
        assert len(symbols) == 124
        assert len(set(symbols)) == 25  # five laps
        for one, other in pairwise(symbols):
            assert successor.setdefault(one, other) == other != one
    assert len({*successor.values()}) == len(successor) == 125
    first_lap = IndexedDataset(tmp_path / "first-lap").document(0)
    assert len(set(first_lap.tolist())) == len(first_lap) == 25
