"""launch/pretrain.py on a node of the soak: steps take SOAK_PACE seconds at least, and a bit flips when a file says so.

The file names the weight and the bit; it is removed once that has flipped. On one rank alone there are no replicas by
which it could be found, and none flips.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megahead.commands.pretrain import main
from megahead.engine.engine import Engine


def disturb(pace: float, flip: Path, ranks: int) -> None:
    """Has it in all steps of this process."""
    update: Callable[..., Any] = Engine.step
    last = 0.0

    def disturbed(engine: Engine, *arguments: Any) -> Any:
        nonlocal last
        result = update(engine, *arguments)
        if ranks > 1 and flip.exists():
            _flip(engine, int(flip.read_text()))
            flip.unlink()
        time.sleep(max(0.0, last + pace - time.monotonic()))
        last = time.monotonic()
        return result

    Engine.step = disturbed  # type: ignore[method-assign, assignment]


def _flip(engine: Engine, number: int) -> None:
    weights = list(engine.replicated_weights().values())
    bits = weights[number % len(weights)].view(-1).view(torch.int32)
    place = number // len(weights) % len(bits)
    bits[place : place + 1].bitwise_xor_(1 << number % 23)


if __name__ == "__main__":
    disturb(float(os.environ["SOAK_PACE"]), Path(os.environ["SOAK_NODE"]) / "flip", int(os.environ["WORLD_SIZE"]))
    main()
