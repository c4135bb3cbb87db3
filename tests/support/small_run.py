"""A real run that takes a second: a tiny decoder on a text with something to learn."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.data.writer import IndexedDatasetWriter

VOCABULARY = 60


def write_text(folder: Path, name: str = "text", documents: int = 200, seed: int = 0) -> str:
    """A dataset of random walks on a sparse graph: each token has three likely successors; documents end with 0."""
    with IndexedDatasetWriter(folder / name, vocab_size=VOCABULARY) as writer:
        for tokens in _walks(documents, seed):
            writer.add_document(tokens)
    return str(folder / name)


@cache
def _walks(documents: int, seed: int) -> list[list[int]]:
    successors = np.random.default_rng(1234).integers(1, VOCABULARY, (VOCABULARY, 3))
    generator, walks = np.random.default_rng(seed), []
    for _ in range(documents):
        tokens = [int(generator.integers(1, VOCABULARY))]
        while generator.random() > 0.02:
            tokens.append(int(successors[tokens[-1], generator.integers(3)]))
        walks.append([*tokens, 0])
    return walks


def small_config(folder: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    """A headless run in `folder`; `changes` maps `section.field` to other values."""
    tree: dict[str, Any] = {
        "name": "small",
        "output_dir": str(folder / "run"),
        "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCABULARY, "vocab_multiple": 64},
        "data": {"train": str(folder / "text"), "validation": str(folder / "text"), "sequence_length": 24},
        "batch": {"global_size": 8, "micro_size": 2},
        "objective": {},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup_steps": 2},
        "training": {
            "steps": 6,
            "log_seconds": 0,
            "evaluate_every": 6,
            "evaluate_samples": 10,
            "checkpoint_every": 3,
            "keep_checkpoints": 9,
        },
        "engine": {"device": "cpu", "deepspeed": {"zero_optimization": {"stage": 0}}},
    }
    for path, value in (changes or {}).items():
        *parents, leaf = path.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return config_from_dict(tree)


def one_step_more(folder: Path) -> dict[str, Any]:
    """The changes that let a run in `folder` end after its next step."""
    seconds = open_checkpoint(folder).state["seconds"] if folder.exists() else 0.0
    return {"output_dir": str(folder), "training.max_seconds": seconds + 1e-9}


def stage(number: int) -> dict[str, Any]:
    """The change that asks for a ZeRO stage."""
    return {"engine.deepspeed": {"zero_optimization": {"stage": number}}}


def shipped(name: str) -> dict[str, Any]:
    """A file of `configs/deepspeed`."""
    content: dict[str, Any] = json.loads((Path(__file__).parents[2] / f"configs/deepspeed/{name}.json").read_text())
    return content


def offloaded(number: int) -> dict[str, Any]:
    """The change that asks for a ZeRO stage as `configs/deepspeed` ships it with the optimizer in the host's memory."""
    path = Path(__file__).parents[2] / f"configs/deepspeed/zero{number}_offload.json"
    return {"engine.deepspeed": json.loads(path.read_text())}


def same_tensors(mine: Path, theirs: Path) -> bool:
    """Whether two runs' newest checkpoints hold the same weights and optimizer state, bit for bit."""
    ours, others = open_checkpoint(mine), open_checkpoint(theirs)
    if ours.files == others.files:  # checksums, too
        ours.verify()
        others.verify()
        return True
    names = [name for name in ours.names() if not name.startswith("state/")]
    assert len(names) > 10
    return all(torch.equal(ours.read(name), others.read(name)) for name in names)
