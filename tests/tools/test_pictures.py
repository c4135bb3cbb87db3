"""The pictures of docs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.image
import pictures
import pytest
from PIL import Image
from website.headless import draw

from support.commands import ROOT


def test_the_committed_picture_is_of_the_size_that_is_drawn_and_opaque(tmp_path: Path) -> None:
    drawn = matplotlib.image.imread(draw(tmp_path / "headless.png"))
    assert pictures.PICTURES["headless"].relative_to(ROOT).as_posix() in (ROOT / "README.md").read_text()
    assert matplotlib.image.imread(pictures.PICTURES["headless"]).shape == drawn.shape
    assert drawn[..., 3].min() == 1.0, "without a ground of its own it cannot be read on a dark page"
    assert drawn[..., :3].min() < 0.2, "nothing is drawn on it"


def carried(picture: Path) -> object:
    """What was drawn, as the file says."""
    with Image.open(picture) as image:
        return json.loads(image.info["Description"])


def test_the_committed_picture_is_the_one_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pictures.py", "verdict", "--output", str(tmp_path / "verdict.png")])
    pictures.main()
    assert pictures.PICTURES["verdict"].name in pictures.PAGE.read_text()
    assert carried(pictures.PICTURES["verdict"]) == carried(tmp_path / "verdict.png"), "run tools/pictures.py verdict"


def test_curves_are_those_of_the_page() -> None:
    page = f"""
{pictures.LONG_HEADING}

| tokens | | BLiMP | rest |
|---|---|---|---|
| 2.5 M | | | 1 |
| 5.0 M | from here on | **60.5 ± 0.7** | 2 |
| 5.0 M | a branch | 61.0 | 3 |

{pictures.EQUAL_HEADING}

| tokens | rest | BLiMP, headless | vanilla |
|---|---|---|---|
| 5.0 M, the end | 9 | 62 | 63.5 |

| tokens | of another table |
|---|---|
"""
    found = pictures.read_curves(page, "BLiMP")
    assert list(found.values()) == [[(5e6, 60.5)], [(5e6, 62.0)], [(5e6, 63.5)]]
    minutes = [points[0][0] for points in pictures.to_minutes(found).values()]
    assert minutes == pytest.approx([6.435, 6.435, 24.452], abs=1e-3)
