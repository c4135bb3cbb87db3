"""The experiments' laboratory: runs of the normal command, made once, reused, and recorded."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest
from rich.console import Console

from experiments.bottleneck import OBJECTIVES, compare_bottleneck, write_language
from experiments.charts import Chart, draw_charts
from experiments.decoders import compare_decoders
from experiments.encoders import compare_encoders
from experiments.laboratory import ROOT, Laboratory
from experiments.large_vocabularies import compare_large_vocabularies
from experiments.latency import compare_latency
from experiments.measures import Row, lines, over_seeds, percent
from experiments.multilingual import compare_multilingual
from experiments.negatives import compare_negatives
from experiments.neighbours import compare_neighbours
from experiments.precision import compare_precision
from experiments.revocabulary import WAYS, compare_revocabulary
from experiments.shapes import compare_shapes
from experiments.variants import compare_variants
from experiments.vocabularies import compare_vocabularies
from megahead.corpus import IndexedDataset
from megahead.errors import UserError
from megahead.report import read_metrics, read_runs
from support.forked import run_script
from support.vocabularies import vocabulary

TINY = [
    "model.num_layers=1",
    "model.hidden_size=16",
    "data.sequence_length=16",
    "batch.global_size=16",
    "training.evaluate_samples=4",
    "schedule.warmup_steps=1",
    "training.steps=2",
]


def run_logged(command: Sequence[str], log: TextIO) -> int:
    done = run_script(*command)
    log.write(done.stdout + done.stderr)
    return done.returncode


@pytest.fixture
def laboratory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laboratory:
    monkeypatch.chdir(ROOT)
    chance = random.Random(0)
    words = ["".join(chance.choices("aeioulnrst", k=chance.randrange(2, 9))) for _ in range(300)]
    texts = [" ".join(chance.choices(words, k=60)) for _ in range(400)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "lab").mkdir()
    monkeypatch.setattr("experiments.laboratory.run_python", run_logged)
    return Laboratory(tmp_path / "lab", tmp_path / "text.jsonl", TINY, Console(quiet=True), vocabulary=320)


def test_a_variant_is_trained_once_scored_with_both_heads_and_recorded(laboratory: Laboratory) -> None:
    compare_variants(laboratory, ["paper, group 4"])
    record = json.loads((laboratory.folder / "variants.json").read_text())
    (row,) = record["results"]
    run, head = (laboratory.folder / name for name in ("paper-group-4", "paper-group-4-head"))
    assert row["run"] == "paper, group 4"
    assert row["own head: perplexity"] == read_metrics(run).validation[-1]["perplexity"]
    assert row["trained head: perplexity"] == read_metrics(head).validation[-1]["perplexity"]
    assert record["settings"] == TINY
    assert record["runs"]["paper-group-4"]["tokens"] == 2 * 16 * 16
    assert record["runs"]["paper-group-4-head"]["config"]["objective"]["name"] == "vanilla"
    assert "| paper, group 4 |" in (laboratory.folder / "variants.md").read_text()

    logs = [(folder / "log.txt").read_text() for folder in (run, head)]
    compare_variants(laboratory, ["paper, group 4"])
    assert [(folder / "log.txt").read_text() for folder in (run, head)] == logs  # neither was started again
    assert json.loads((laboratory.folder / "variants.json").read_text())["results"] == [row]


def test_groups_in_batches_and_pairs_of_vocabularies(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_negatives(laboratory, ["batch-16-group-1"])
    (row,) = json.loads((laboratory.folder / "negatives.json").read_text())["results"]
    assert (row["batch"], row["group"]) == (16, 1)
    assert 1 < row["candidates"] <= 16
    monkeypatch.setattr("experiments.vocabularies.SIZES", (300,))
    compare_vocabularies(laboratory, [])
    headless, vanilla = json.loads((laboratory.folder / "vocabularies.json").read_text())["results"]
    assert (headless["objective"], vanilla["objective"]) == ("headless", "vanilla")
    assert headless["vocabulary"] == vanilla["vocabulary"] == 300
    assert headless["headless is faster"] == headless["tokens/s"] / vanilla["tokens/s"]
    assert 0 < headless["bits per byte"] < 20


@pytest.mark.slow
def test_decoders_along_training_and_with_a_trained_head(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"SEEDS": (0,), "STEPS": 2, "POINTS": 2, "HEAD_STEPS": 2, "LONG_HEAD_STEPS": 2, "HEAD_POINTS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(f"experiments.decoders.{name}", value)
    monkeypatch.setattr("experiments.decoders.AT_THE_END", "lambada_openai")
    (tmp_path / "lambada").mkdir()
    texts = ["The sea is as deep as the sea", "A dog is not a cat, nor is a cat a dog"]
    (tmp_path / "lambada/lambada_test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    compare_decoders(replace(laboratory, tasks_data=tmp_path), [])
    rows = results(laboratory, "decoders")
    assert [(row["objective"], row["head"], row["step"]) for row in rows] == [
        *(("headless", head, step) for step in (1, 2) for head in ("tied", "pmi")),
        *(("vanilla", "trained", step) for step in (1, 2)),
        *(("headless", "trained", step) for step in (1, 2)),
    ]
    assert rows[-1]["tokens"] == rows[3]["tokens"] + 2 * 16 * 16  # those of the body, and of the head
    (pmi,) = (row for row in rows if row["head"] == "pmi" and row["step"] == 2)
    held_out = read_metrics(laboratory.folder / "headless-0").validation[-1]["perplexity"]
    assert pmi["perplexity"] == pytest.approx(held_out)
    assert (laboratory.folder / "decoders.png").stat().st_size > 5_000
    ends = results(laboratory, "decoders-ends")
    assert [(row["objective"], row["head"], row["seeds"]) for row in ends] == [
        *(("headless", head, 1) for head in ("tied", "pmi")),
        ("vanilla", "trained", 1),
        ("headless", "trained", 1),
    ]
    assert ends[1]["perplexity"] == pmi["perplexity"]
    scored = results(laboratory, "decoders-lambada")
    assert [(row["objective"], row["head"]) for row in scored] == [
        *(("headless", "pmi"),) * 2,
        *(("vanilla", "trained"),) * 2,
        *(("headless", "trained"),) * 2,
    ]
    assert scored[-1]["tokens"] == rows[-1]["tokens"]
    assert all(row["perplexity"] > 1 and row["± acc"] is not None for row in scored)
    perplexity, _ = results(laboratory, "decoders-tasks")
    models = ["headless-0", "head-0", "vanilla-0", "random-0"]
    assert list(perplexity) == ["task", "metric", *models]
    assert perplexity["head-0"].startswith(f"{scored[-1]['perplexity']:.4g} ± ")


def results(laboratory: Laboratory, name: str) -> list[Row]:
    record: dict[str, list[Row]] = json.loads((laboratory.folder / f"{name}.json").read_text())
    return record["results"]


def test_rows_over_seeds_and_lines() -> None:
    rows = [{"run": "a", "seed": seed, "x": seed, "loss": loss} for seed, loss in enumerate((1.0, 3.0))]
    rows.append({"run": "b", "seed": 0, "x": 0, "loss": 5.0})
    assert over_seeds(rows, ("run",), ("loss",)) == [
        {"run": "a", "seeds": 2, "loss": 2.0, "± loss": pytest.approx(2**0.5)},
        {"run": "b", "seeds": 1, "loss": 5.0, "± loss": None},
    ]
    assert lines(rows, "run", "x", "loss") == {"a": [(0, 1.0), (1, 3.0)], "b": [(0, 5.0)]}
    assert [percent(values) for values in ([0.5], [0.25, 0.75])] == ["50.0", "50.0 ± 35.4"]


def test_charts_have_one_colour_a_name_and_mark_the_points() -> None:
    two = {"headless": [(1, 2.0), (4, 3.0)], "vanilla": [(4, 9.0), (1, 8.0)]}
    figure = draw_charts([Chart("one", "rows", two, log_across=True, from_zero=True), Chart("two", "rows", two)])
    first, second = figure.axes
    assert [line.get_color() for line in first.get_lines()] == [line.get_color() for line in second.get_lines()]
    assert list(first.get_lines()[1].get_xdata()) == [1, 4]  # from left to right, however the rows came
    assert [label.get_text() for label in first.get_xticklabels()] == ["1", "4"]
    assert first.get_ylim()[0] == 0 < second.get_ylim()[0]


def test_steps_are_timed_once_for_each_batch(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.latency.SHAPES", (("bert-tiny", 16),))
    monkeypatch.setattr("experiments.latency.TOKENS", {"bert-tiny": (8, 16, 32)})
    compare_latency(laboratory, [])
    rows = results(laboratory, "latency")
    assert [(row["batch"], row["objective"]) for row in rows] == [
        (batch, objective) for batch in (1, 2) for objective in ("headless", "vanilla")
    ]
    assert all(row["times headless"] == row["ms"] / rows[k // 2 * 2]["ms"] for k, row in enumerate(rows))
    assert all(20 < row["peak MB"] < 2_000 for row in rows)  # 30,522 x 128 weights, gradients and moments: 62 MB
    compare_latency(laboratory, [])
    assert results(laboratory, "latency") == rows


def test_languages_and_xnli(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = laboratory.encoder_data()
    made = laboratory.folder.parent / "wordpiece-320"
    folder = tmp_path / "languages"
    folder.mkdir()
    for name, source in {"de": "text", "en": "text", "validation": "text-validation"}.items():
        for ending in ("bin", "idx", "json"):
            (folder / f"{name}.{ending}").write_bytes((made / f"{source}.{ending}").read_bytes())
    (tmp_path / "xnli").mkdir()
    for language in ("de", "en"):
        pairs = [(word, label) for word in ("man", "dog", "sea", "sun") for label in LABELS]
        rows = [f"a {word}\tthe {word} in {language}\t{label}\n" for word, label in pairs]
        (tmp_path / f"xnli/dev-{language}.tsv").write_text("".join(rows))
    monkeypatch.setattr("experiments.multilingual.LANGUAGES", ("de", "en"))
    monkeypatch.setattr("experiments.multilingual.STEPS", 2)
    given = [part for part in settings if not part.startswith(("data.train=", "data.validation="))]
    sizes = [part for part in TINY if "training.steps" not in part]
    several = replace(laboratory, text=folder, settings=[*sizes, *given, "batch.micro_size=16"], tasks_data=tmp_path)
    compare_multilingual(several, [])
    assert [row["run"] for row in results(laboratory, "multilingual")] == ["headless", "vanilla"]
    config = read_runs([laboratory.folder / "headless"])[0].config
    assert [Path(part["prefix"]).name for part in config["data"]["train"]] == ["de", "en"]
    rows = results(laboratory, "xnli")
    assert [row["model"] for row in rows] == ["headless", "vanilla", "random weights"]
    assert all(float(row[column]) > 0 for row in rows for column in ("English only", "target language", "de", "en"))


def test_precisions_are_held_against_seeds(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.precision.VOCABULARY", 320)
    shape = ["model.num_heads=2", "batch.micro_size=8", "training.evaluate_every=1"]
    compare_precision(replace(laboratory, settings=[*TINY, *shape]), [])
    rows = results(laboratory, "precision")
    assert [(row["precision"], row["seed"], row["step"]) for row in rows] == [
        (precision, seed, step) for seed in (0, 1) for precision in ("fp32", "bf16") for step in (1, 2)
    ]
    apart = {row["differ in"]: row for row in results(laboratory, "precision-apart")}
    assert apart.keys() == {"precision", "seed", "precision and seed"}
    assert 0 < apart["precision"]["mean apart"] < apart["seed"]["mean apart"]
    assert [row["seeds"] for row in results(laboratory, "precision-ends")] == [2, 2]


@pytest.mark.slow
def test_shapes_are_swept_and_the_best_rate_gets_the_other_seeds(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"VOCABULARY": 320, "RATES": (1e-3, 1e-2), "ENCODER_STEPS": 10, "ENCODER_POINTS": 2}
    for name, value in small.items():
        monkeypatch.setattr(f"experiments.shapes.{name}", value)
    sizes = [part for part in TINY if not part.startswith("training.steps")]
    shape = ["model.num_heads=2", "batch.micro_size=8", "training.evaluate_every=1"]
    compare_shapes(replace(laboratory, settings=[*TINY, *shape]), ["pythia", "llama"])
    rows = {(row["shape"], row["rate"]): row for row in results(laboratory, "shapes")}
    assert rows.keys() == {(shape, rate) for shape in ("pythia", "llama") for rate in (1e-3, 1e-2)}
    for shape in ("pythia", "llama"):
        first = {rate: read_metrics(laboratory.folder / f"{shape}-{rate:g}-0").validation[-1] for rate in (1e-3, 1e-2)}
        best = min(first, key=lambda rate: first[rate]["perplexity"])
        assert [rows[shape, rate]["seeds"] for rate in (1e-3, 1e-2)] == [1 + (rate == best) for rate in (1e-3, 1e-2)]
    shape = ["model.num_heads=2", "model.intermediate_size=32", "batch.micro_size=8"]
    compare_shapes(replace(laboratory, settings=[*sizes, *shape]), ["bert", "modernbert"])
    along = [(row["shape"], row["step"]) for row in results(laboratory, "shapes-encoders")]
    assert along == [(shape, step) for shape in ("bert", "modernbert") for step in (5, 10)]
    families = {run.name: run.config["model"]["family"] for run in read_runs([laboratory.folder / "bert"])}
    assert families == {"bert": "bert"}


@pytest.mark.parametrize(("kind", "variant"), [("decoder", "meap-30"), ("encoder", "similar")])
def test_neighbours_are_held_against_the_plain_objective_at_equal_tokens_and_time(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, kind: str, variant: str
) -> None:
    sizes = {"VOCABULARY": 320, "SEEDS": (0,), "STEPS": {kind: 4}, "WARMUP": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(f"experiments.neighbours.{name}", value)
    speeds = {"plain": 100, variant: 150}
    name_of = re.compile(rf"{kind}-(.*)-0(-time)?")
    monkeypatch.setattr("experiments.neighbours.speed", lambda run: speeds[name_of.fullmatch(run.name)[1]])  # type: ignore[index]
    settings = [part for part in TINY if "training.steps" not in part]
    shape = ["model.num_heads=2", "batch.micro_size=8", "training.evaluate_every=2"]
    compare_neighbours(replace(laboratory, settings=[*settings, *shape]), [variant])
    rows = results(laboratory, "neighbours")
    assert [(row["model"], row["variant"], row["at equal"], row["tokens"]) for row in rows] == [
        (kind, "plain", "tokens", 4 * 256),
        (kind, variant, "tokens", 4 * 256),
        (kind, variant, "time", 6 * 256),  # as many as it takes in the plain one's time
    ]
    config = read_runs([laboratory.folder / f"{kind}-{variant}-0"])[0].config
    asked = {"decoder": ("masked_inputs", "mask_token", 320), "encoder": ("masking", "similar_share", 0.4)}
    section, setting, value = asked[kind]
    assert config[section][setting] == value


def test_large_vocabularies_are_scored_by_language(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"SIZES": (300, 420), "STEPS": 4, "PAIRS": (300,), "PAIR_STEPS": 2, "HELD_OUT_BYTES": 2_000}
    for name, value in sizes.items():
        monkeypatch.setattr(f"experiments.large_vocabularies.{name}", value)
    texts = [json.loads(line) for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    languages = ("de", "sw")
    given = [text | {"lang": languages[place % 2]} for place, text in enumerate(texts)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in given))
    settings = [part for part in TINY if not part.startswith(("training.", "data."))] + ["batch.micro_size=8"]
    compare_large_vocabularies(replace(laboratory, settings=[*settings, "data.sequence_length=16"]), [])
    rows = results(laboratory, "large_vocabularies")
    assert [(row["vocabulary"], row["at equal"]) for row in rows] == [
        (size, equal) for size in (300, 420) for equal in ("text", "time")
    ]
    assert [row["steps"] for row in rows[:2]] == [4, 4]
    assert rows[2]["steps"] < rows[3]["steps"] == 4
    assert rows[2]["MB of text"] == pytest.approx(rows[0]["MB of text"], rel=0.2)
    by_language = results(laboratory, "large_vocabularies-languages")
    assert [row["language"] for row in by_language] == ["de", "sw"]
    mean = sum(row["420, equal time"] for row in by_language) / 2
    assert mean == pytest.approx(rows[3]["bits per byte"])
    assert all(1 < row["420: tokens a word"] < row["300: tokens a word"] for row in by_language)
    headless, vanilla = results(laboratory, "large_vocabularies-vanilla")
    assert (headless["objective"], headless["times headless"]) == ("headless", 1)
    assert (vanilla["objective"], vanilla["steps"]) == ("vanilla", 2)
    split = tmp_path / "languages"
    trained, held = ({*(split / f"{name}.jsonl").read_text().splitlines()} for name in ("train", "de"))
    assert held
    assert not trained & held


LABELS = ("entailment", "neutral", "contradiction")


@pytest.mark.slow
def test_a_decoder_moves_to_two_vocabularies_and_each_way_is_told(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"LARGER": 400, "STEPS": 2, "STEPS_AFTER": 2, "EVERY": 1, "HELD_OUT": 20}.items():
        monkeypatch.setattr(f"experiments.revocabulary.{name}", value)
    other = vocabulary(tmp_path, "sentencepiece", 420).tokenizer.path
    settings = [part for part in TINY if "training.steps" not in part]
    compare_revocabulary(replace(laboratory, tokenizer=other, settings=settings), [])
    rows = results(laboratory, "revocabulary")
    assert [(row["vocabulary"], row["way"]) for row in rows] == [
        (name, way) for name in ("400 ids", "sentencepiece-420") for way in WAYS
    ]
    assert all(0 < row["at the end"] < 20 for row in rows)
    goal = read_metrics(laboratory.folder / "runs/base").validation[-1]["bits_per_byte"]
    for row in rows:
        run = read_metrics(laboratory.folder / "runs" / f"{row['vocabulary']}-{row['way']}".replace(" ", "-"))
        back = [record["tokens"] for record in run.validation if record["bits_per_byte"] <= goal]
        assert row["tokens until back"] == (back[0] if back else None)
    assert (laboratory.folder / "revocabulary.png").stat().st_size > 5_000
    compare_revocabulary(replace(laboratory, tokenizer=other, settings=settings), ["headless-table"])
    assert [row["way"] for row in results(laboratory, "revocabulary")] == ["headless-table"] * 2


def test_who_learns_a_language_of_facts(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZES": (64,), "RATES": (1e-3, 1.6e-2), "STEPS": 4, "HELD_OUT": 3}.items():
        monkeypatch.setattr(f"experiments.bottleneck.{name}", value)
    compare_bottleneck(replace(laboratory, text=None, settings=("schedule.warmup_steps=1",)), [])
    tried = results(laboratory, "bottleneck-rates")
    best = results(laboratory, "bottleneck")
    assert [(row["objective"], row["rate"]) for row in tried] == [
        (objective, rate) for objective in OBJECTIVES for rate in (1e-3, 1.6e-2)
    ]
    assert [row["loss"] for row in best] == [min(tried[k]["loss"], tried[k + 1]["loss"]) for k in (0, 2, 4)]
    assert all(0 < row["gradient_share"] <= 1 for row in best)
    assert (laboratory.folder / "bottleneck.png").stat().st_size > 5_000


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


def test_an_experiment_says_that_it_needs_a_text(laboratory: Laboratory) -> None:
    with pytest.raises(UserError, match="`--text` must name what this experiment reads, but is missing"):
        compare_negatives(replace(laboratory, text=None), [])


def test_encoders_with_clean_and_with_wrong_labels(laboratory: Laboratory, tmp_path: Path) -> None:
    texts = [(word, label) for word in ("man", "dog", "sea") for label in ("entailment", "not_entailment")]
    for part in ("train", "dev"):
        (tmp_path / "glue/RTE").mkdir(parents=True, exist_ok=True)
        rows = [f"{k}\ta {word}\tthe {word}\t{label}\n" for k, (word, label) in enumerate(texts)]
        (tmp_path / f"glue/RTE/{part}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "".join(rows))
    for part in ("train", "val"):
        (tmp_path / "superglue/CB").mkdir(parents=True, exist_ok=True)
        pairs = [{"premise": f"a {w}", "hypothesis": w, "label": label} for w in ("man", "sea") for label in LABELS]
        (tmp_path / f"superglue/CB/{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    laboratory = replace(laboratory, settings=[*TINY, "batch.micro_size=16"], tasks_data=tmp_path)
    compare_encoders(laboratory, [])
    scored = {row["task"]: row for row in results(laboratory, "encoders-balanced")}
    assert {"glue/rte", "superglue/cb", "training"} <= {*scored}
    assert list(scored["glue/rte"])[-4:] == ["headless", "vanilla", "wrong-labels", "random weights"]
    rows = json.loads((laboratory.folder / "encoders.json").read_text())["results"]
    assert [row["run"] for row in rows] == ["headless", "vanilla", "wrong-labels"]
    data = laboratory.folder.parent / "wordpiece-320"
    clean, wrong = (IndexedDataset(data / name) for name in ("text", "text-wrong"))
    same = [np.mean(clean[i] == wrong[i]) for i in range(len(clean))]
    assert 0.87 < np.mean(same) < 0.93
    assert all(clean[i][-1] == wrong[i][-1] for i in range(len(clean)))


def test_a_run_that_was_stopped_is_no_result_until_it_went_on(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(command: Sequence[str], log: TextIO) -> int:
        return run_logged([part.replace("training.steps=2", "training.steps=1") for part in command], log)

    monkeypatch.setattr("experiments.laboratory.run_python", stopped)
    with pytest.raises(UserError, match="training early must reach its last step, but was stopped; call again"):
        laboratory.train("small-headless", "early", *laboratory.data())
    monkeypatch.setattr("experiments.laboratory.run_python", run_logged)
    assert laboratory.train("small-headless", "early", *laboratory.data()).training[-1]["step"] == 2


def test_a_run_that_fails_is_told_with_the_end_of_its_log(laboratory: Laboratory) -> None:
    with pytest.raises(UserError, match=r"(?s)training broken must come to its end, but failed.*data\.tokenizer"):
        laboratory.train("small-headless", "broken")
