"""An export never holds the model: its peak stays far below the model's size. One of 1,066 MB took 238 MB."""

from __future__ import annotations

from pathlib import Path

from megahead.hf.export import export
from support.forked import forked
from support.peaks import measures_peaks, peak_above
from support.small_checkpoint import save_small, small_config


@measures_peaks
def test_the_peak_is_that_of_the_largest_tensors(tmp_path: Path) -> None:
    shape = {"num_layers": 8, "hidden_size": 512, "num_heads": 8, "vocab_size": 4000}
    forked(save_small, tmp_path / "large", small_config(model=shape, objective={"name": "vanilla"}), 0, 3, 0.02)
    save_small(tmp_path / "tiny", small_config())
    peak = forked(peak_of_export, tmp_path)
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) > 110 << 20
    assert peak < 60 << 20


def peak_of_export(folder: Path) -> int:
    export(folder / "tiny", folder / "tiny-out", "pmi")  # everything is imported and warm
    return peak_above(lambda: export(folder / "large", folder / "out", "trained"))[0]
