"""lm-eval's own command line gives, on an exported folder and the tasks we write, the numbers that our tool gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.harness_tasks import task_files, write_tasks
from megahead.hf.export import ensure_hf_folder
from support.forked import fork_pythons
from support.small_checkpoint import save_small, save_tokenizer, small_config

LIMIT = 12


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_the_same_numbers(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    fork_pythons(monkeypatch)
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300, "family": family}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    folder = ensure_hf_folder(tmp_path / "run")
    files = task_files(["lambada_openai", "arc_easy"], shared_data)
    ours = [*evaluate_tasks(folder, files, limit=LIMIT, batch_size=4)]  # first: what it imports the fork need not
    definitions = write_tasks(files, tmp_path / "made")
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf"]
    command += ["--model_args", f"pretrained={folder},dtype=float32", "--include_path", str(definitions)]
    command += ["--tasks", *files, "--limit", str(LIMIT), "--batch_size", "4", "--device", "cpu"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--output_path", tmp_path / "out"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(written.read_text())["results"]
    for task in ours:
        assert task.samples == LIMIT
        for score in task.scores:
            assert score.value == pytest.approx(theirs[task.task][f"{score.metric},none"], rel=1e-6), score.metric
