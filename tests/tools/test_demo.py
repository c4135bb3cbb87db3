"""The demo: its parts on a small corpus, and its sizes."""

from __future__ import annotations

import email
import io
import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from demo import FULL, MODELS, QUICK, Size
from rich.console import Console

from demo_pipeline.pipeline import ROOT, Pipeline, show, time_rows
from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from megahead.errors import FieldError
from megahead.estimate import run_parameters
from megahead.report.tables import to_rich
from megahead.run_process import pretrain
from steps.once import StepRunner
from support.commands import call
from support.forked import fork_pythons, run_script
from support.long import long_but

LITTLE = [
    "model.vocab_size=1024",
    "model.hidden_size=48",
    "data.sequence_length=64",
    "training.steps=6",
    "training.evaluate_every=3",
    "training.checkpoint_every=6",
    "training.evaluate_samples=16",
    "schedule.warmup_steps=2",
]


@pytest.mark.slow
@pytest.mark.parametrize("model", long_but(["pythia"], MODELS))
def test_text_to_a_speaking_model_and_everything_reused_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(ROOT)
    fork_pythons(monkeypatch)
    ranks_of = {"demo-headless": 2, "demo-head": 1}
    monkeypatch.setattr(
        "demo_pipeline.pipeline.pretrain",
        lambda config, overrides, ranks: pretrain(config, overrides, ranks=ranks_of[config]),
    )
    roots = [Path(str(module.__file__)).parent for module in (email, logging)]
    console = Console(record=True, width=80)
    pipeline = Pipeline(tmp_path, console, size=QUICK.for_model(model), overrides=LITTLE, roots=roots)
    rows = pipeline.run(with_vanilla=False)
    assert [row["model"] for row in rows] == ["tied head", "pmi head", "trained head"]
    assert all(1 < row["perplexity"] < 2000 for row in rows)
    assert json.loads((tmp_path / "results.json").read_text()) == rows
    show(tmp_path, rows, pipeline.stages)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert "perplexity of the pmi head" in console.export_text()

    again = Pipeline(tmp_path, console, size=QUICK.for_model(model), overrides=LITTLE, roots=roots)
    assert again.run(with_vanilla=False) == rows
    assert all(stage.reused for stage in again.stages.finished)


def test_the_table_adds_up_what_this_run_did(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    stages = StepRunner(tmp_path, console)
    stages.run("first", lambda: "one")
    StepRunner(tmp_path, console).run("second", lambda: 2.0)
    stages.run("second", lambda: 0.0, describe_result="{:.2f} s".format)
    for stage, seconds in zip(stages.finished, (3.0, 50.0), strict=True):
        object.__setattr__(stage, "seconds", seconds)  # frozen
    stages.finished.append(replace(stages.finished[0], name="third", seconds=4.0))
    console.print(to_rich(time_rows(stages), right=["time"]))
    table = console.file.getvalue().splitlines()[-5:]
    assert [line.split() for line in table] == [
        ["stage", "time", "result"],
        ["first", "3.0s", "one"],
        ["second", "reused", "2.00", "s"],
        ["third", "4.0s", "one"],
        ["this", "call", "7.0s"],
    ]


def run_of(folder: Path, size: Size, name: str) -> RunConfig:
    settings = Pipeline(folder, Console(file=io.StringIO()), size=size).settings(name)
    return load_config(ROOT / f"configs/demo-{name}.yaml", settings)


SIZES = [FULL, QUICK, FULL.for_model("llama"), QUICK.for_model("llama")]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_runs_of_a_size_fit_each_other_and_end_in_an_evaluation(tmp_path: Path, size: Size) -> None:
    headless, head, vanilla = (run_of(tmp_path, size, name) for name in ("headless", "head", "vanilla"))
    assert headless.model == head.model == vanilla.model
    assert headless.data == head.data == vanilla.data
    assert headless.data.train == f"{tmp_path}/data/train"
    for run in (headless, head):
        assert run.training.steps % run.training.evaluate_every == 0
        assert run.training.steps >= 2 * run.training.evaluate_every


def test_the_quick_one_learns_less_and_lies_elsewhere(tmp_path: Path) -> None:
    full, quick = (run_of(tmp_path, size, "headless") for size in (FULL, QUICK))
    assert quick.training.steps * quick.batch.global_size <= full.training.steps * full.batch.global_size / 4
    assert len({size.folder for size in SIZES}) == len({size.name for size in SIZES}) == 4
    for file, pattern in ((".gitignore", "^/{}$"), (".dockerignore", "^{}$"), ("Makefile", r"^\trm -rf .*\b{}( |$)")):
        for size in SIZES:
            assert re.search(pattern.format(size.folder), (ROOT / file).read_text(), re.MULTILINE), (file, size.folder)


def test_a_llama_is_as_large_as_the_decoder_it_stands_beside(tmp_path: Path) -> None:
    """Of biases it has none."""
    pythia, llama = (run_of(tmp_path, size, "headless") for size in (FULL, FULL.for_model("llama")))
    assert llama.model.family == "llama"
    counts = [run_parameters(config).body for config in (pythia, llama)]
    assert counts[1] == pytest.approx(counts[0], rel=0.02)


def test_a_folder_holds_one_size_alone(tmp_path: Path) -> None:
    for _ in range(2):
        FULL.claim(tmp_path / "demo")
    with pytest.raises(FieldError, match=r"hold no demo but a quick one, but is .*/demo with a full one instead"):
        QUICK.claim(tmp_path / "demo")
    QUICK.claim(tmp_path / "new/place")
    with pytest.raises(FieldError, match="with a quick one"):
        FULL.claim(tmp_path / "new/place")


def test_the_command_touches_nothing_in_a_folder_of_the_other_size(tmp_path: Path) -> None:
    FULL.claim(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = run_script("tools/demo.py", "--quick", "--folder", tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: `--folder` must hold no demo but a quick one, but is {tmp_path} with a full one instead; "
        "name another, or none.\n"
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_help_comes_at_once_and_fits_a_terminal() -> None:
    done = call(sys.executable, "-X", "importtime", "tools/demo.py", "--help")
    assert re.search(r"\| +argparse$", done.stderr, re.MULTILINE)
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) <= 80
    commands = re.findall(r"^ +(make demo\S*(?: ARGS=(?:\"[^\"]+\"|\S+))?)", done.stdout, re.MULTILINE)
    assert commands == [
        "make demo",
        "make demo ARGS=--quick",
        "make demo ARGS=--with-vanilla",
        'make demo ARGS="--model llama"',
    ]
