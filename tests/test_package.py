"""`import megahead`: what it offers, and what it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import megahead
from megahead.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def test_every_name_is_what_its_home_calls_so() -> None:
    for name in megahead.__all__:
        assert getattr(megahead, name).__name__ == name
        assert name in dir(megahead)
    with pytest.raises(AttributeError, match="no attribute 'pretrian'"):
        megahead.pretrian  # noqa: B018


def test_names_that_scripts_import_from_packages_stay_there() -> None:
    data, objectives = (import_module(f"megahead.{name}") for name in ("data", "objectives"))
    assert data.IndexedDataset is megahead.IndexedDataset
    assert data.IndexedDatasetWriter is megahead.IndexedDatasetWriter
    assert objectives.cwt_loss is megahead.cwt_loss


def test_type_checkers_see_the_names_at_the_same_homes() -> None:
    tree = ast.parse(Path(megahead.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: line.module for line in block.body if isinstance(line, ast.ImportFrom) for alias in line.names}
    assert seen.keys() == set(megahead.__all__)
    for name, home in seen.items():
        assert getattr(megahead, name) is getattr(import_module(str(home)), name)


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    assert Path(megahead.__file__).with_name("py.typed").is_file()


def test_importing_it_and_reading_a_config_need_no_torch() -> None:
    code = "import sys, megahead; megahead.load_config('small-headless'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_path_or_override_is_taken_for_a_list_of_one(tmp_path: Path) -> None:
    assert megahead.load_config("small-headless", "training.steps=70").training.steps == 70
    with pytest.raises(UserError, match=r"`.*nope\.jsonl` must be a text file, but there is none"):
        megahead.preprocess(tmp_path / "nope.jsonl", "tokenizer.json", tmp_path / "out")


def test_the_checkout_holds_no_results() -> None:
    """Of commands whose default output is the folder in which they run."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    at_top = {name for name in listed.stdout.splitlines() if "/" not in name}
    assert not [name for name in at_top if Path(name).suffix in (".json", ".jsonl", ".png", ".csv", ".npy", ".log")]
