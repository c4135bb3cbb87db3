"""The laboratory in which experiments run here."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from experiments.laboratory import ROOT, Laboratory
from support.laboratory import TINY, run_logged


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
