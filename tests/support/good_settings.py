"""The least that a config must say, to be made wrong by tests."""

from __future__ import annotations

from typing import Any

GOOD: dict[str, Any] = {
    "name": "good",
    "model": {"size": "pythia-14m", "vocab_size": 50277},
    "data": {"train": "text", "sequence_length": 128},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"steps": 100},
}
