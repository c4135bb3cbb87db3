"""The runner in which experiments run here."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from experiments.runner import ROOT, ExperimentRunner
from support.runner import TINY, run_logged


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, its tokenizers and datasets, made once."""
    folder = tmp_path_factory.mktemp("prepared")
    chance = random.Random(0)
    words = ["".join(chance.choices("aeioulnrst", k=chance.randrange(2, 9))) for _ in range(300)]
    texts = [" ".join(chance.choices(words, k=60)) for _ in range(400)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.runner.run_python", run_logged)
        runner = runner_in(folder)
        runner.data()
        runner.data(encoder=True)
    return folder


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: Path) -> ExperimentRunner:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("experiments.runner.run_python", run_logged)
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return runner_in(tmp_path)


def runner_in(folder: Path) -> ExperimentRunner:
    (folder / "lab").mkdir(exist_ok=True)
    return ExperimentRunner(folder / "lab", folder / "text.jsonl", TINY, Console(quiet=True), vocabulary=320)
