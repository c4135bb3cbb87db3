"""Tasks along training, from a run's own log: each metric a panel, each run a line in the order of its tokens."""

from __future__ import annotations

import json
from pathlib import Path

from megahead.report.figures import TaskPoint, draw_task_curves, logged_task_scores, save_figure
from megahead.report.read import read_all_metrics, read_metrics


def write_run(folder: Path, *tokens: int) -> Path:
    folder.mkdir()
    lines = [{"step": 1, "tokens": 1, "seconds": 1.0, "loss": 2.0}]
    for step, count in enumerate(tokens, 2):
        sciq = {"acc": {"value": count / 100, "stderr": 0.1}, "acc_norm": {"value": 0.5, "stderr": None}}
        found = {"sciq": sciq, "lambada_openai": {"perplexity": {"value": 1e4 / count, "stderr": 3.0}}}
        lines.append({"step": step, "tokens": count, "seconds": 1.0, "tasks": found})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_share_panels(tmp_path: Path) -> None:
    runs = [read_metrics(write_run(tmp_path / name, *tokens)) for name, tokens in (("a", (10, 20)), ("b", (15, 30)))]
    assert [record["step"] for record in runs[0].training] == [1]
    points = [point for run in runs for point in logged_task_scores(run)]
    figure = draw_task_curves(sorted(points, key=lambda point: -point.tokens))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["sciq  ·  acc", "sciq  ·  acc_norm", "lambada_openai  ·  perplexity"]
    assert figure.axes[2].get_yscale() == "log"
    (later, earlier) = (container[0] for container in figure.axes[0].containers)
    assert list(earlier.get_xdata()) == [10, 20]
    assert list(later.get_ydata()) == [0.15, 0.3]
    assert save_figure(draw_task_curves(points), tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_equal_names_are_told_apart_and_a_value_may_be_missing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    folders = [write_run(tmp_path / "a" / "_run", 10, 20), write_run(tmp_path / "b" / "_run", 15, 30)]
    log = folders[1] / "metrics.jsonl"
    log.write_text(log.read_text().replace('"value": 0.3,', '"value": null,'))
    runs = read_all_metrics(folders)
    assert [run.name for run in runs] == [*map(str, folders)]
    figure = draw_task_curves([point for run in runs for point in logged_task_scores(run)])
    first, second = (container[0] for container in figure.axes[0].containers)
    assert (list(first.get_xdata()), list(second.get_xdata())) == ([10, 20], [15, 30])
    figure = draw_task_curves(logged_task_scores(read_metrics(folders[0])))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["_run"]


def test_hours_are_panels_of_their_own_where_all_are_known_and_random_weights_a_line() -> None:
    points = [TaskPoint(run, n, "rte", "accuracy", 0.5, None, n / 10) for run in ("a", "b") for n in (20, 10)]
    figure = draw_task_curves(points, random_scores={("rte", "accuracy"): 0.4})
    assert [axes.get_xlabel() for axes in figure.axes] == ["tokens", "hours"]
    assert [list(axes.containers[1][0].get_xdata()) for axes in figure.axes] == [[10, 20], [1.0, 2.0]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "random weights"]
    figure = draw_task_curves([*points, points[0]._replace(run="c", hours=None)])
    assert [axes.get_xlabel() for axes in figure.axes] == ["tokens"]
