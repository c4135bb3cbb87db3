"""The site of `make docs`: every page has its place, each is near the front page, nothing comes from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megahead.commands import COMMANDS
from support.commands import ROOT

SETTINGS = ROOT / "tools/website/mkdocs.yml"
ELSEWHERE = {"index.md", "changelog.md", "commands.md", "contributing.md", "tests.md"}
"""Pages of the site that are made of files outside of docs, or of commands."""


def places(entries: list[dict[str, object]]) -> Iterator[str]:
    """The pages of a navigation, in its order."""
    for entry in entries:
        for below in entry.values():
            yield from places(below) if isinstance(below, list) else [str(below)]


def test_the_navigation_has_every_page_once() -> None:
    named = list(places(yaml.safe_load(SETTINGS.read_text())["nav"]))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(pages | ELSEWHERE)


def links(page: Path) -> set[Path]:
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+\.md)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def test_every_page_is_two_clicks_from_the_readme() -> None:
    first = links(ROOT / "README.md")
    second = {target for page in first for target in links(page)}
    assert not {*(ROOT / "docs").rglob("*.md")} - first - second


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs mkdocs-material (`make docs`)")
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(SETTINGS), "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?([^\"' >]+)", page.read_text())
        loaded += re.findall(
            r"<link\b[^>]*\brel=[\"']?(?:stylesheet|icon)[^>]*href=[\"']?([^\"' >]+)", page.read_text()
        )
        assert loaded
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page
    commands = (tmp_path / "commands.html").read_text()
    assert all(f"usage: megahead {name.replace('_', '-')}" in commands for group in COMMANDS.values() for name in group)
    assert 'href="models.html#another-vocabulary"' in (tmp_path / "index.html").read_text()
