"""Run by hand or by test_export_memory: the peak memory of one export above that of an interpreter ready for it, in MB.

PYTHONPATH=tests python tests/hf/export_memory.py FOLDER save LAYERS WIDTH VOCABULARY
PYTHONPATH=tests python tests/hf/export_memory.py FOLDER measure
A model of 1,066 MB (14 layers, width 1024, 50,277 ids, untied) took 238 MB.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from megahead.hf.export import export
from support.small_checkpoint import save_small, small_config


def model_bytes(folder: Path) -> int:
    """Size of the exported weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def peak_mb() -> float:
    """The most this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def save(folder: Path, layers: int, width: int, vocabulary: int) -> None:
    """A checkpoint of random weights; needs the whole model, hence in another process than the export."""
    model = {"num_layers": layers, "hidden_size": width, "num_heads": 8, "vocab_size": vocabulary}
    save_small(folder / "large", small_config(model=model, objective={"name": "vanilla"}), scale=0.02)


def main() -> None:
    folder, action = Path(sys.argv[1]), sys.argv[2]
    if action == "save":
        save(folder, *map(int, sys.argv[3:]))
        return
    save_small(folder / "tiny", small_config())
    export(folder / "tiny", folder / "tiny-out", "pmi")  # everything is imported and warm
    before = peak_mb()
    export(folder / "large", folder / "out", "trained")
    print(peak_mb() - before, model_bytes(folder / "out") / 2**20)


if __name__ == "__main__":
    main()
