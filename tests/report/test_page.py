"""The HTML page of runs: what it tells of a real run, of several, and of runs that went wrong."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from megahead.commands import report
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.report.page import render_page
from megahead.report.panels import MAX_POINTS
from megahead.report.read import read_metrics, read_runs
from megahead.train.run import pretrain
from support.logged_run import evaluation, training, write_run
from support.named import folder_of, without_digits
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text


def page_of(*folders: Path) -> tuple[str, dict[str, Any]]:
    """The page, and the data of its charts; every element is closed and nothing is fetched."""
    page = render_page(read_runs(folders))
    Balanced().check(page)
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return page, json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def trained(_: Group, config: RunConfig) -> str:
    return pretrain(config, Launch()).ending


class Balanced(HTMLParser):
    """Fails for an element that is not closed, or closed twice."""

    def check(self, page: str) -> None:
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def titles(data: dict[str, Any]) -> list[str]:
    return [panel["title"] for panel in data["panels"]]


def test_a_run_that_was_resumed_past_a_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path)
    on_ranks(1, trained, config)
    (damaged,) = folder_of(tmp_path / "run", 6).glob("tensors-*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    on_ranks(1, trained, small_config(tmp_path, {"training.steps": 8}))
    sample = {"prompt": "<b>5 & 7", "text": " 9 </script><script>alert(1)"}
    (tmp_path / "run/samples.jsonl").write_text(json.dumps(sample) + "\n")

    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path / "run")])
    report.main()
    page, data = page_of(tmp_path / "run")
    assert (tmp_path / "run/report.html").read_text() == page
    assert titles(data)[0] == "Held-out perplexity"
    assert {"Training loss", "Gradient norm", "Learning rate", "Tokens per second", "Candidates"} <= {*titles(data)}
    (loss,) = (panel["series"] for panel in data["panels"] if panel["key"] == "loss")
    assert loss[0]["x"]["step"] == list(range(1, 9))
    texts = [event["text"] for event in data["runs"][0]["events"]]
    assert "skipped a damaged checkpoint" in texts[0]
    assert [without_digits(text) for text in texts[1:]] == ["resumed from step-00000003"]
    assert all(
        text in without_digits(page)
        for text in ("resumed from step-00000003", "steps of 8", "<b>finished</b>", "(pmi head)")
    )
    assert "<b>&lt;b&gt;5 &amp; 7</b> 9 &lt;/script&gt;" in page
    assert "learning_rate</span><span class=setting>0.003" in page


def test_geometry_is_measured_once_for_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)
    on_ranks(1, trained, small_config(tmp_path))
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path / "run"), "--geometry"])
    report.main()
    assert capsys.readouterr().out.count("measuring") == 2
    on_ranks(1, trained, small_config(tmp_path, {"training.steps": 8}))
    report.main()
    (measured,) = (line for line in capsys.readouterr().out.splitlines() if "measuring" in line)
    assert without_digits(measured).endswith("step-00000008")
    _, data = page_of(tmp_path / "run")
    (share,) = (panel["series"][0] for panel in data["panels"] if panel["key"] == "gradient_share")
    assert share["x"]["step"] == [3, 6, 8]
    assert share["x"]["tokens"] == [3 * 8 * 24, 6 * 8 * 24, 8 * 8 * 24]
    assert share["x"]["seconds"][2] > share["x"]["seconds"][0] > 0
    assert all(0 < value <= 1 for value in share["y"])
    (tmp_path / "run/geometry.json").write_text("[")
    _, data = page_of(tmp_path / "run")
    assert "gradient_share" not in {panel["key"] for panel in data["panels"]}


def test_several_runs_share_charts_and_their_differences_are_listed(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a/run", training(1), evaluation(2, 80.0)),
        write_run(tmp_path / "b/run", training(1), training(2, loss=7.5), evaluation(2, 70.0)),
    ]
    for rate, folder in enumerate(folders, 1):
        config = {"name": "x", "optimizer": {"learning_rate": rate}, "training": {"steps": 4}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    page, data = page_of(*folders)
    assert [run["name"] for run in data["runs"]] == [str(folder) for folder in folders]  # their names are the same
    (loss,) = (panel["series"] for panel in data["panels"] if panel["key"] == "loss")
    assert [(line["run"], line["y"]) for line in loss] == [(0, [9.0]), (1, [9.0, 7.5])]
    assert "<td class='number best'>70</td>" in page
    differing = page[page.index("differing") : page.index("<details")]
    assert "optimizer.learning_rate" in differing
    assert "training.steps" not in differing


def test_a_run_in_phases_says_when_it_goes_over(tmp_path: Path) -> None:
    begun = {"resumed": "step-00000002", "continues": 2, "damaged": [], "new_phase": True}
    switch = {"step": 2, "tokens": 200, "seconds": 4.0, "session": begun}
    folder = write_run(tmp_path / "both", training(1), training(2), evaluation(2, 9.0), switch, training(3))
    settings = {"objective": {"name": "headless", "schedule": {"causal_share": 0.5, "vanilla_share": 0.2}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    page, _ = page_of(folder)
    assert "<td class=calm>the next phase continued from step-00000002</td>" in page
    assert "headless, on next tokens for the first 50%, vanilla for the last 20% of the steps" in page


@pytest.mark.parametrize(("family", "told"), [({"family": "llama"}, "llama"), ({}, "model")])
def test_a_run_is_described_by_its_family_and_shape(tmp_path: Path, family: dict[str, str], told: str) -> None:
    folder = write_run(tmp_path / "run", training(1))
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": family | {"num_layers": 2, "hidden_size": 32}}))
    assert f"{told}, 2 layers x 32" in page_of(folder)[0]


def test_settings_of_another_kind_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", training(1))
    model = {"vocab_size": "many", "size": ["14m"], "num_layers": "two"}
    settings = {"training": {"steps": "abc"}, "model": model, "objective": {"name": "headless", "schedule": 3}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    page, _ = page_of(folder)
    assert "<b>1</b><span>steps</span>" in page
    assert "vocabulary" not in page


def test_a_run_named_by_dots_has_the_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "mine", training(1))
    (folder / "checkpoints").mkdir()
    monkeypatch.chdir(folder / "checkpoints")
    assert read_metrics(Path("..")).name == "mine"
    monkeypatch.chdir(folder)
    assert read_metrics(Path()).name == "mine"


def test_losses_that_are_not_finite_break_the_line_and_stand_among_the_events(tmp_path: Path) -> None:
    where = [{"rank": 1, "first": 16, "last": 17}]
    fault = {"kind": "loss not finite", "action": "skip", "scale": 1.0, "where": where}
    bad = {"step": 1, "tokens": 200, "seconds": 4.0, "fault": fault | {"loss": "nan", "gradient_norm": "nan"}}
    back = {"step": 1, "tokens": 300, "seconds": 5.0, "rollback": {"checkpoint": "step-00000001"}}
    records = [training(1), bad, back, training(2, loss=math.nan), training(3, gradient_norm=math.inf)]
    page, data = page_of(write_run(tmp_path / "bad", *records))
    assert titles(data) == ["Training loss", "Gradient norm", "Learning rate", "Tokens per second"]  # nothing held out
    loss, norm = (panel["series"][0] for panel in data["panels"][:2])
    assert loss["y"][1] is None
    assert loss["mean"][1] is None
    assert norm["y"][2] is None
    told = "loss not finite (loss nan, gradient norm nan) on rank 1, samples 16 to 17: skipped"
    assert f"<td class=wrong>{told}</td>" in page
    assert "<td class=calm>rolled back to step-00000001</td>" in page


def test_long_logs_are_thinned_to_means_and_tasks_get_panels(tmp_path: Path) -> None:
    found = {"lambada": {"perplexity": {"value": 30.0, "stderr": 1.0}}}
    task = {"step": 9, "tokens": 900, "seconds": 18.0, "tasks": found}
    records = [training(step, loss=float(step % 2)) for step in range(1, 4 * MAX_POINTS + 3)]
    _, data = page_of(write_run(tmp_path / "long", *records, task))
    (loss,) = data["panels"][0]["series"]
    assert len(loss["y"]) == len(loss["mean"]) == len(loss["x"]["seconds"]) <= MAX_POINTS
    assert set(loss["y"][:-1]) <= {0.4, 0.5, 0.6}
    assert data["panels"][-1]["title"] == "lambada  ·  perplexity"
    assert data["panels"][-1]["series"][0]["y"] == [30.0]


def test_samples_hold_any_end_of_a_line_and_a_broken_one_costs_itself_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", training(1))
    samples = [{"prompt": "a", "text": "one\u2028two\x85three"}, {"prompt": "b", "text": "four"}]
    lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
    (folder / "samples.jsonl").write_text("\n".join([lines[0], "{broken", lines[1], ""]), encoding="utf-8")
    assert list(read_runs([folder])[0].samples) == samples
