"""A small multilingual encoder, headless and vanilla, on XNLI (the paper's Table 5 and Fig. 6).

--text is the folder of datasets, one a language, that docs/encoders.md makes; `--set data.tokenizer=F` names their
tokenizer. Both are fine-tuned in seven languages, the paper's, each on half of XNLI's dev set, and tested on the other
half, beside the same shape with random weights: in the language trained on, and, trained on English alone, in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from experiments.charts import Chart
from experiments.laboratory import Laboratory
from experiments.measures import Row, lines, percent, scores, speed
from megahead.evaluate.finetuning import FineTuningResult, FineTuningResults

LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "zh")
STEPS = 600
FINE_TUNING = ["--epochs", "3", "--learning-rate", "3e-4", "--batch-size", "32", "--seeds", "1"]
OBJECTIVES = ("headless", "vanilla")


def compare_multilingual(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains headless and vanilla (or those of `only`); fine-tunes them where --tasks-data is given."""
    folder = laboratory.given_text()
    parts = sorted(path.with_suffix("") for path in folder.glob("*.idx") if not path.stem.endswith("validation"))
    given = ",".join(f"{{prefix: {part}}}" for part in parts)
    data = [f"data.train=[{given}]", f"data.validation={folder / 'validation'}"]
    course = [f"training.steps={STEPS}", f"training.evaluate_every={max(1, STEPS // 8)}"]
    names = [name for name in OBJECTIVES if not only or name in only]
    runs = {name: laboratory.train(f"multilingual-small-{name}", name, *data, *course) for name in names}
    rows = [
        {"run": name, **scores(run, run.validation[-1]["head"]), "tokens/s": speed(run)} for name, run in runs.items()
    ]
    points = [{**record, "run": name} for name, run in runs.items() for record in run.validation]
    chart = Chart(
        "Held-out perplexity of masked tokens", "tokens", lines(points, "run", "tokens", "perplexity"), log_up=True
    )
    laboratory.record("multilingual", rows, chart)
    if laboratory.tasks_data is not None:
        _fine_tune(laboratory, names, laboratory.tasks_data)


def _fine_tune(laboratory: Laboratory, names: Sequence[str], data: Path) -> None:
    models = [str(laboratory.folder / name) for name in names]
    output = laboratory.folder / "xnli-seeds.json"
    tasks = ["--task", *(f"xnli/{one}" for one in LANGUAGES), "--languages", ",".join(LANGUAGES), "--data", str(data)]
    laboratory.run("finetune.py", "--model", *models, *tasks, "--floor", *FINE_TUNING, "--output", str(output))
    results = FineTuningResults(output).newest()
    laboratory.record("xnli", [_row(model, results) for model in dict.fromkeys(one.model for one in results)])


def _row(model: str, results: Sequence[FineTuningResult]) -> Row:
    """Accuracies of a model, means over languages for each seed: its table cells."""
    mine = [result for result in results if result.model == model]
    english: list[float] = []
    target: list[float] = []
    for seed in sorted({result.seed for result in mine}):
        reached = {one.task.removeprefix("xnli/"): one.scores() for one in mine if one.seed == seed}
        english.append(mean(found["accuracy"] for found in reached["en"].values()))
        target.append(mean(reached[language][language]["accuracy"] for language in reached))
    row: Row = {"model": Path(model).name, "English only": percent(english), "target language": percent(target)}
    for language in LANGUAGES:
        row[language] = percent([one.scores()[language]["accuracy"] for one in mine if one.task == f"xnli/{language}"])
    return row
