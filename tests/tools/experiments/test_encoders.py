"""Encoders, languages and variants after as many operations, in tiny."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from experiments.encoders import compare_encoders, compare_glue, compare_multilingual, compare_vocabularies
from experiments.runner import GRIDS, ExperimentRunner
from megahead.data.indexed import IndexedDataset
from megahead.report.read import read_runs
from support.long import long
from support.runner import TINY, results


@pytest.mark.long
def test_encoders_with_clean_and_with_wrong_labels(runner: ExperimentRunner, tmp_path: Path) -> None:
    texts = [(word, label) for word in ("man", "dog", "sea") for label in ("entailment", "not_entailment")]
    for part in ("train", "dev"):
        (tmp_path / "glue/RTE").mkdir(parents=True, exist_ok=True)
        rows = [f"{k}\ta {word}\tthe {word}\t{label}\n" for k, (word, label) in enumerate(texts)]
        (tmp_path / f"glue/RTE/{part}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "".join(rows))
    for part in ("train", "val"):
        (tmp_path / "superglue/CB").mkdir(parents=True, exist_ok=True)
        pairs = [{"premise": f"a {w}", "hypothesis": w, "label": label} for w in ("man", "sea") for label in LABELS]
        (tmp_path / f"superglue/CB/{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    runner = replace(runner, settings=[*TINY, "batch.micro_size=16"], tasks_data=tmp_path)
    compare_encoders(runner, [])
    scored = {row["task"]: row for row in results(runner, "encoders-balanced")}
    assert {"glue/rte", "superglue/cb", "training"} <= {*scored}
    assert list(scored["glue/rte"])[-6:] == [*RUNS, "random weights"]
    rows = json.loads((runner.folder / "encoders.json").read_text())["results"]
    assert [row["run"] for row in rows] == [*RUNS]
    configs = {run.name: run.config for run in read_runs([runner.folder / name for name in RUNS])}
    assert {name for name, config in configs.items() if config["masking"]["noise_share"] == 0.1} == {*RUNS[3:]}
    data = runner.folder.parent / "wordpiece-320"
    clean, wrong = (IndexedDataset(data / name) for name in ("text", "text-wrong"))
    same = [np.mean(clean[i] == wrong[i]) for i in range(len(clean))]
    assert 0.87 < np.mean(same) < 0.93
    assert all(clean[i][-1] == wrong[i][-1] for i in range(len(clean)))


RUNS = [*GRIDS["encoders"]["axes"]["run"]]
LABELS = ("entailment", "neutral", "contradiction")


def test_languages_and_xnli(runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = runner.data(encoder=True)
    made = runner.folder.parent / "wordpiece-320"
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
    monkeypatch.setattr("experiments.encoders.LANGUAGES", ("de", "en"))
    monkeypatch.setitem(GRIDS["multilingual"], "settings", ["training.steps=2", "training.evaluate_every=1"])
    given = [part for part in settings if not part.startswith(("data.train=", "data.validation="))]
    sizes = [part for part in TINY if "training.steps" not in part]
    several = replace(runner, text=folder, settings=[*sizes, *given, "batch.micro_size=16"], tasks_data=tmp_path)
    compare_multilingual(several, [])
    assert [row["run"] for row in results(runner, "multilingual")] == ["headless", "vanilla"]
    config = read_runs([runner.folder / "headless"])[0].config
    assert [Path(part["prefix"]).name for part in config["data"]["train"]] == ["de", "en"]
    rows = results(runner, "xnli")
    assert [row["model"] for row in rows] == ["headless", "vanilla", "random weights"]
    assert all(float(row[column]) > 0 for row in rows for column in ("English only", "target language", "de", "en"))


@pytest.mark.parametrize(
    "names",
    [
        ["plain", "electra-headless"],
        long(["plain", "frequency", "causal-50", "electra-headless", "electra-vanilla"]),
    ],
    ids=["few", "all"],
)
def test_all_are_trained_to_the_plain_ones_operations_and_fine_tuned(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: list[str]
) -> None:
    pairs = [(word, label) for word in ("man", "dog", "sea") for label in ("entailment", "not_entailment")]
    (tmp_path / "glue/RTE").mkdir(parents=True)
    rows = [f"{k}\ta {word}\tthe {word}\t{label}\n" for k, (word, label) in enumerate(pairs)]
    for part in ("train", "dev"):
        (tmp_path / f"glue/RTE/{part}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "".join(rows))
    for name, value in {"STEPS": 20, "PROBE_STEPS": 4, "SEEDS": 1}.items():
        monkeypatch.setattr(f"experiments.encoders.{name}", value)
    settings = [part for part in TINY if "steps" not in part]
    settings += ["model.num_heads=2", "batch.micro_size=16", "training.log_seconds=0"]
    compare_glue(replace(runner, settings=settings, tasks_data=tmp_path), ["plain"])
    compare_glue(replace(runner, settings=settings, tasks_data=tmp_path), names)
    rows_of = {row["run"]: row for row in results(runner, "glue-runs")}
    assert [*rows_of] == names
    for name, row in rows_of.items():
        a_step = row["PFLOP"] / (row["tokens"] / 256)
        assert row["PFLOP"] == pytest.approx(rows_of["plain"]["PFLOP"], abs=a_step), name
        assert (row["kept"] is not None) == name.startswith("electra")
    assert rows_of["electra-headless"]["tokens"] < rows_of["plain"]["tokens"]
    for run in read_runs([runner.folder / name for name in names]):
        objective = run.config["objective"]
        assert objective["name"] == ("vanilla" if run.name == "electra-vanilla" else "headless")
        assert bool(objective["replaced_tokens"]) == run.name.startswith("electra")
    (scored,) = [row for row in results(runner, "glue") if row["task"] == "glue/rte"]
    assert {*names} < {*scored}


def test_vocabularies_of_both_objectives_are_fine_tuned(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [("man", 0), ("dog", 1), ("sea", 0), ("sun", 1)]
    tables = {
        "CoLA": [f"x\t{label}\t\tthe {word}\n" for word, label in lines],
        "SST-2": ["sentence\tlabel\n", *(f"the {word}\t{label}\n" for word, label in lines)],
    }
    for task, rows in tables.items():
        (tmp_path / "glue" / task).mkdir(parents=True)
        for part in ("train", "dev"):
            (tmp_path / "glue" / task / f"{part}.tsv").write_text("".join(rows))
    axes = GRIDS["vocabularies"]["axes"]
    monkeypatch.setitem(axes, "vocabulary", {"values": [320]})
    monkeypatch.setitem(axes, "seed", {"set": "seed", "values": [0, 1]})
    settings = [*TINY, "model.num_heads=2", "batch.micro_size=16"]
    compare_vocabularies(replace(runner, settings=settings, tasks_data=tmp_path), [])
    runs = results(runner, "vocabularies-runs")
    assert [(row["objective"], row["seed"]) for row in runs] == [
        (objective, seed) for objective in ("headless", "vanilla") for seed in (0, 1)
    ]
    headless, vanilla = results(runner, "vocabularies")
    assert headless["GLUE"] == mean(row["GLUE"] for row in runs[:2])
    assert headless["vocabulary"] == vanilla["vocabulary"] == 320
    assert (runner.folder / "vocabularies.png").exists()
