"""The picture of docs/research/verdict.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import verdict_picture
from PIL import Image


def carried(picture: Path) -> object:
    """What was drawn, as the file says."""
    with Image.open(picture) as image:
        return json.loads(image.info["Description"])


def test_the_committed_picture_is_the_one_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["verdict_picture.py", "--output", str(tmp_path / "verdict.png")])
    verdict_picture.main()
    assert verdict_picture.PICTURE.name in verdict_picture.PAGE.read_text()
    assert carried(verdict_picture.PICTURE) == carried(tmp_path / "verdict.png"), "run tools/verdict_picture.py"


def test_curves_are_those_of_the_page() -> None:
    page = f"""
{verdict_picture.LONG}

| tokens | | BLiMP | rest |
|---|---|---|---|
| 2.5 M | | | 1 |
| 5.0 M | from here on | **60.5 ± 0.7** | 2 |
| 5.0 M | a branch | 61.0 | 3 |

{verdict_picture.LEVEL}

| tokens | rest | BLiMP, headless | vanilla |
|---|---|---|---|
| 5.0 M, the end | 9 | 62 | 63.5 |

| tokens | of another table |
|---|---|
"""
    found = verdict_picture.curves(page, "BLiMP")
    assert list(found.values()) == [[(5e6, 60.5)], [(5e6, 62.0)], [(5e6, 63.5)]]
    minutes = [points[0][0] for points in verdict_picture.along_time(found).values()]
    assert minutes == pytest.approx([6.435, 6.435, 24.452], abs=1e-3)
