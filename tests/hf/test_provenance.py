"""What a model card says of the code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import megahead
from megahead.hf import card as provenance
from megahead.hf.card import code_version


def repository(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)


def test_a_checkout_names_its_commit_and_a_package_within_another_repository_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(tmp_path / "checkout")
    for place, version in (("checkout", ", commit "), ("checkout/.venv/site-packages", "")):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)  # else git would find no folder, and thus no commit
        monkeypatch.setattr(provenance, "_CHECKOUT", tmp_path / place)
        assert code_version().startswith(f"megahead {megahead.__version__}{version}")
        assert ("commit" in code_version()) == bool(version)
