"""docs/python.md as one program, then its commands, in a folder with a text alone; the long form from a wheel."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megahead.run_folder import RunFolder
from support.commands import ROOT
from support.forked import run_script
from support.installed import install, run_installed

PAGE = (ROOT / "docs/python.md").read_text()
SETTINGS = [
    *("training.steps=6", "training.evaluate_every=3", "schedule.warmup_steps=2", "model.vocab_size=300"),
    *("model.num_layers=1", "model.hidden_size=32", "data.sequence_length=16", "batch.global_size=8"),
    "engine.device=cpu",
]
TINY = {
    ", 8192)": ", 300)",
    "vocab_size=8192": "vocab_size=300",
    '"training.steps=300"': ", ".join(f'"{setting}"' for setting in SETTINGS),
    "--set training.steps=300": " ".join(f"--set {setting}" for setting in SETTINGS),
}
"""What is made smaller; each stands somewhere on the page."""
AFTERWARDS = """
import sys, megahead, torch
assert not torch.distributed.is_initialized()
print("imported from", megahead.__file__)
files = {name: vars(module).get("__file__") or "" for name, module in sys.modules.items()}
print("of this checkout", [name for name, file in files.items() if file.startswith(ROOT)])
"""


Runner = Callable[..., subprocess.CompletedProcess[str]]
"""Runs a program, or `megahead`, with arguments."""


@pytest.mark.slow
def test_the_page_runs_in_an_empty_folder(tmp_path: Path) -> None:
    here = tmp_path / "here"

    def run(program: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_script(*(("-m", program) if program == "megahead" else (program,)), *arguments, cwd=here)

    assert_the_page_runs(tmp_path, here, run)


@pytest.mark.long
def test_an_installed_package_runs_the_page_in_an_empty_folder(tmp_path: Path) -> None:
    site, here = install(tmp_path), tmp_path / "here"

    def run(program: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_installed(site, site / "bin" / program if program == "megahead" else Path(program), here, *arguments)

    output = assert_the_page_runs(tmp_path, here, run)
    assert f"imported from {site}/megahead/__init__.py\nof this checkout []\n" in output


def assert_the_page_runs(tmp_path: Path, here: Path, run: Runner) -> str:
    """What the page's code printed."""
    (here / "data").mkdir(parents=True)
    stories = [f"the cat saw the rat, the dog met the bird {k} times and sat on the mat" for k in range(400)]
    (here / "text.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    (tmp_path / "page.py").write_text(f"{code('python')}\nROOT = {str(ROOT / 'megahead')!r}{AFTERWARDS}")
    done = run(tmp_path / "page.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(RunFolder(here / "runs/mine").session_end.read_text()) == {
        "ending": "finished",
        "step": 6,
        "steps": 6,
    }
    (during,) = re.findall(r"^finished at step 6, perplexity ([\d.]+): runs/mine$", done.stdout, re.MULTILINE)
    assert f"\npmi: perplexity {during}\n" in done.stdout  # what is evaluated afterwards is what training saw
    assert (here / "models/mine/model.safetensors").is_file()
    assert "\n[17  4 99  0]\n" in done.stdout
    learns_by_itself(done.stdout)
    told = commands_told(run)
    assert "400 documents (2 of them held out" in told["preprocess"]
    assert (here / "data/text.bin").read_bytes() == (here / "data/text-again.bin").read_bytes()
    assert "finished at step 6" in told["pretrain"]
    assert "wrote models/shell in" in told["convert"]
    assert "2 runs compared" in (here / "report.html").read_text()
    return done.stdout


def commands_told(run: Runner) -> dict[str, str]:
    """What each of the page's commands printed, by its name."""
    told = {}
    for line in code("bash").splitlines():
        program, name, *arguments = line.split()
        done = run(program, name, *arguments)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        told[name] = done.stdout
    return told


def learns_by_itself(output: str) -> None:
    """The loss in a trainer of one's own falls, and its training-free head predicts a text of 50 ids."""
    ((before, after),) = re.findall(r"^([\d.]+) -> ([\d.]+)$", output, re.MULTILINE)
    assert float(after) < float(before) - 0.5
    (perplexity,) = re.findall(r"^perplexity ([\d.]+)$", output, re.MULTILINE)
    assert float(perplexity) < 60


def code(language: str) -> str:
    """The page's fences of a language, made small."""
    text = "\n".join(re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    for large, small in TINY.items():
        text = text.replace(large, small)
    return text


def test_what_is_made_smaller_stands_on_the_page() -> None:
    assert not [large for large in TINY if large not in PAGE]
