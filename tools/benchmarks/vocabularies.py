"""Steps of one model under larger and larger vocabularies, its embedding dense or in rows: the same ids, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.memory import cost
from benchmarks.tokens import micro_batch, token_rows
from megahead.config import RunConfig, RunPlan, config_from_dict
from megahead.distributed import Group, Mesh
from megahead.objectives import build_objective
from megahead.pretraining import first_weights
from megahead.report import to_rich
from megahead.table import plan_rows
from megahead.train.setup import build_engine

Rows = np.ndarray[Any, Any]


def grow(
    config: RunConfig, vocabularies: Sequence[int], prefix: str | None, steps: int, device: torch.device
) -> list[dict[str, object]]:
    """Times `steps` steps under each vocabulary on ids that the smallest has, dense and in rows, and tells; the
    table's lines."""
    rows = token_rows(_under(config, min(vocabularies), "dense"), prefix, count=steps + 1)
    lines: list[dict[str, object]] = []
    for kind in ("rows", "dense"):
        configs = [_under(config, size, kind) for size in vocabularies]
        peaks = [None if device.type == "cuda" else _in_a_fresh_process(_peak, config, rows) for config in configs]
        lines += _timed(configs, rows, peaks, device)
    Console(highlight=False).print(to_rich(lines))
    return lines


class Stepper:
    """A run's engine on one rank, stepped by itself."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config, self._device = config, device
        plan = RunPlan.of(config)
        self.engine, _ = build_engine(plan, Mesh(), device, first_weights(config))
        self._rule = build_objective(config.objective, config.model.vocab_size)

    def step(self, rows: Rows) -> float:
        """Seconds of the process (on CUDA of the clock) for a step, from the choice of its candidates on."""
        start = self._now()
        micro = micro_batch(self.config, self._rule, rows).staged(self._device)
        self.engine.begin(plan_rows(micro.ids(), Group()) if self.config.in_rows() else None)
        self.engine.micro_step(micro.to(self._device))
        self.engine.step(1e-3)
        return self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()  # other processes do not count


def _under(config: RunConfig, vocabulary: int, kind: str) -> RunConfig:
    tree = config.model_dump(mode="json")
    tree["model"]["vocab_size"] = vocabulary
    tree["engine"]["embedding"] = kind
    tree["batch"]["global_size"] = config.batch.micro_size
    return config_from_dict(tree, f"--vocabulary {vocabulary}")


def _in_a_fresh_process(work: Callable[..., float], *arguments: object) -> float:
    """`work(*arguments)` where nothing that was freed before hides what it takes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _peak(config: RunConfig, rows: Sequence[Rows]) -> float:
    """MiB that a step takes beside what lies there between steps, on a CPU."""
    torch.set_num_threads(1)
    stepper = Stepper(config, torch.device("cpu"))
    stepper.step(rows[0])
    return cost(lambda: stepper.step(rows[1]))[1]


def _timed(
    configs: Sequence[RunConfig], rows: Sequence[Rows], peaks: Sequence[float | None], device: torch.device
) -> list[dict[str, object]]:
    """A line for each; the first round is a warm-up."""
    steppers = [Stepper(config, device) for config in configs]
    rounds = [[stepper.step(each) for stepper in steppers] for each in rows][1:]
    lines: list[dict[str, object]] = []
    for place, (config, peak) in enumerate(zip(configs, peaks, strict=True)):
        line: dict[str, object] = {
            "embedding": config.engine.embedding,
            "vocabulary": config.model.vocab_size,
            "ms": round(statistics.median(times[place] for times in rounds) * 1e3),
            "to the first": f"{statistics.median(times[place] / times[0] for times in rounds):.2f}",
        }
        lines.append(line | ({} if peak is None else {"a step's MiB": round(peak)}))
    return lines
