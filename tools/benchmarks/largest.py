"""The largest micro-batch of each objective whose step a GPU's memory holds."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks.contender import Contender
from benchmarks.tokens import token_rows
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.report.tables import to_rich
from megahead.terminal import terminal

STEPS = 3
"""Of each micro-batch; the first is a warm-up."""


def fill(
    config: RunConfig, objectives: Sequence[str], most: int, prefix: str | None, device: torch.device
) -> list[dict[str, object]]:
    """Finds for each objective the largest micro-batch of up to `most` rows that fits, and tells; the table's lines."""
    lines: list[dict[str, object]] = []
    for name in objectives:
        fitting: dict[int, dict[str, object] | None] = {0: {}}

        def fits(rows: int, name: str = name, found: dict[int, dict[str, object] | None] = fitting) -> bool:
            found[rows] = _line(_of(config, rows), name, prefix, device)
            return found[rows] is not None

        largest = largest_that(fits, config.batch.micro_size, most)
        lines.append({"objective": name, "rows of the micro-batch": largest, **(fitting[largest] or {})})
    terminal().print(to_rich(lines))
    return lines


def largest_that(fits: Callable[[int], bool], first: int, most: int) -> int:
    """The largest number up to `most` that fits, to an eighth of it; 0 where `first` does not fit."""
    good, rows = 0, min(first, most)
    while rows > good and fits(rows):
        good, rows = rows, min(2 * rows, most)
    if good in (0, rows):
        return good
    bad = rows
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def _line(config: RunConfig, name: str, prefix: str | None, device: torch.device) -> dict[str, object] | None:
    """What steps took; None where memory does not hold one."""
    try:
        return _measured(config, name, prefix, device)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(config: RunConfig, name: str, prefix: str | None, device: torch.device) -> dict[str, object]:
    contender = Contender(config, name, device, token_rows(config, prefix, count=STEPS))
    for index in range(STEPS):
        contender.step(index)
    tokens, peak = config.batch.micro_size * config.data.sequence_length, contender.peak_megabytes()
    speed = round(tokens / statistics.median(contender.seconds()))
    return {"tokens": tokens, "tokens/s": speed, "peak MB": None if peak is None else round(peak)}


def _of(config: RunConfig, rows: int) -> RunConfig:
    tree = config.model_dump(mode="json")
    tree["batch"] |= {"micro_size": rows, "global_size": rows}
    return config_from_dict(tree)
