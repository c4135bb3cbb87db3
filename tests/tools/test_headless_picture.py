"""The README's first picture."""

from __future__ import annotations

from pathlib import Path

import headless_picture
import matplotlib.image

from megahead.report.figures import draw
from support.commands import ROOT


def test_the_committed_picture_is_of_the_size_that_is_drawn_and_opaque(tmp_path: Path) -> None:
    drawn = matplotlib.image.imread(draw(tmp_path / "headless.png"))
    assert headless_picture.PICTURE.relative_to(ROOT).as_posix() in (ROOT / "README.md").read_text()
    assert matplotlib.image.imread(headless_picture.PICTURE).shape == drawn.shape
    assert drawn[..., 3].min() == 1.0, "without a ground of its own it cannot be read on a dark page"
    assert drawn[..., :3].min() < 0.2, "nothing is drawn on it"
