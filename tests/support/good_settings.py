"""The least that a config must say, to be made wrong by tests."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megahead.config.loading import config_from_dict
from megahead.errors import ConfigErrors

GOOD: dict[str, Any] = {
    "name": "good",
    "model": {"size": "pythia-14m", "vocab_size": 50277},
    "data": {"train": "text", "sequence_length": 128},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"steps": 100},
}

LLAMA: dict[str, Any] = {"model.size": None} | {
    f"model.{field}": value
    for field, value in {"family": "llama", "num_layers": 1, "hidden_size": 32, "num_heads": 4}.items()
}

BERT: dict[str, Any] = {
    "model.size": "bert-tiny",
    "model.vocab_size": 50,
    "data.sequence_length": 16,
    "data.end_token": 2,
}
MASKS: dict[str, Any] = {"mask_token": 3, "cls_token": 1, "sep_token": 2}


def assert_told(changes: dict[str, Any], sentence: str) -> None:
    """With these changes `GOOD` has one mistake, of which the sentence tells word for word."""
    tree = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *sections, field = path.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[field] = value
    with pytest.raises(ConfigErrors) as caught:
        config_from_dict(tree, source="run.yaml")
    assert str(caught.value) == f"run.yaml has 1 mistake:\n  {sentence}"
