"""Where a training step makes the host wait for the GPU, and who asks for it: we, DeepSpeed, the backward pass."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.distributed.launch import Launch
from megahead.train import loop
from megahead.train.run import pretrain
from megahead.train.step import train_step

WARM_UP = 3
OWNERS = {"megahead": "megahead", "deepspeed": "DeepSpeed"}
BACKWARD = "backward pass"
Place = tuple[str, str]
"""Who waits, and the line."""


def counted(config: RunConfig, steps: int) -> Counter[Place]:
    """How often each place waited in `steps` steps of `config`, after a few that are not counted."""
    waits: Counter[Place] = Counter()
    taken = 0

    def watched(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        with noted(waits) if taken > WARM_UP else torch.autograd.set_multithreading_enabled(False):
            return train_step(*arguments)

    with tempfile.TemporaryDirectory() as folder, patch.object(loop, "train_step", watched):
        pretrain(_short(config, folder, WARM_UP + steps), Launch())
    return waits


@contextmanager
def noted(waits: Counter[Place]) -> Iterator[None]:
    """Inside, every wait of this thread for a GPU is added to `waits`; backward passes run in this thread, too."""

    def note(*_: Any, **__: Any) -> None:
        waits[place(traceback.extract_stack()[:-1])] += 1

    explicit = [(torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")]
    plain = [getattr(owner, name) for owner, name in explicit]
    with warnings.catch_warnings(), torch.autograd.set_multithreading_enabled(False):
        warnings.filterwarnings("always", ".*synchronizing CUDA operation")
        warnings.showwarning = lambda message, *_, **__: note() if "synchronizing CUDA" in str(message) else None
        for (owner, name), function in zip(explicit, plain, strict=True):
            setattr(owner, name, _noting(function, note))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for (owner, name), function in zip(explicit, plain, strict=True):
                setattr(owner, name, function)


def place(stack: Sequence[traceback.FrameSummary]) -> Place:
    """The innermost frame of a package that can be asked about it; C++ of a backward pass is nobody's."""
    for frame in reversed(stack):
        parts = Path(frame.filename).parts
        if parts[-3:] == ("torch", "autograd", "graph.py"):
            return BACKWARD, f"{frame.name}"
        for package, owner in OWNERS.items():
            if package in parts[:-1]:
                inside = parts[len(parts) - 1 - parts[::-1].index(package) :]
                return owner, f"{'/'.join(inside)}:{frame.lineno} in {frame.name}"
    return "other", f"{stack[-1].filename}:{stack[-1].lineno}"


def _noting(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def wait(*arguments: Any, **named: Any) -> Any:
        note()
        return function(*arguments, **named)

    return wait


def _short(config: RunConfig, folder: str, steps: int) -> RunConfig:
    """The same steps, without anything between or after them."""
    tree = config.model_dump(mode="json")
    tree["output_dir"] = folder
    tree["schedule"] = {"name": "constant"}
    tree["tasks"] = None
    tree["data"]["validation"] = None
    plan = {"evaluate_every": 10**9, "checkpoint_every": 10**9, "log_seconds": 10**9}
    tree["training"] |= {"steps": steps, "max_seconds": None} | plan
    return config_from_dict(tree)
