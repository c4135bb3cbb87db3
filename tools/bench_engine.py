"""Times the engine's steps against a bare torch loop, and several ranks against one.

OMP_NUM_THREADS=1 tools/bench_engine.py                 every ZeRO stage on one rank, beside a loop without an engine
OMP_NUM_THREADS=1 tools/bench_engine.py --ranks 2       the engine on two ranks, beside two single ranks at once

Every contender is a process of its own (DeepSpeed changes what it is imported into) with one thread a rank, and takes
one step when told to, in turn with the others, so that a noisy machine hits all alike. Ratios are medians over rounds
of a step's time over the first contender's in the same round; CPU time, unlike wall time, leaves out waiting for
others' programs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from benchmarks.tokens import micro_batch, token_rows
from megahead.config import RunConfig, config_from_dict, deepspeed_config
from megahead.distributed import Group, Mesh
from megahead.errors import run_command
from megahead.estimate import count_parameters
from megahead.objectives import build_objective
from megahead.optim import build_adamw
from megahead.parallel import assemble, fill_
from megahead.pretraining import MicroBatch, first_weights
from megahead.report import to_rich
from megahead.wording import counted

CPU = torch.device("cpu")
Step = Callable[[], None]
Place = tuple[int, int, str]
"""Rank, number of ranks, and a file at which they meet."""
SETTINGS = Path(__file__).resolve().parents[1] / "configs/deepspeed"
SHAPE = {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "vocab_size": 12288}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows of a rank's micro-batch (default: 8)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens a row (default: 256)")
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages to time (default: 0,1,2,3)")
    parser.add_argument("--ranks", type=int, default=1, help="compare this many ranks with one (default: stages only)")
    parser.add_argument("--rounds", type=int, default=15, help="counted steps of each (default: 15)")
    arguments = parser.parse_args()
    config = make_config(arguments.rows, arguments.sequence_length, SHAPE)
    stages = [int(stage) for stage in arguments.stages.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        field = (
            on_one_rank(config, stages) if arguments.ranks == 1 else on_ranks(config, stages, arguments.ranks, folder)
        )
        rounds = [[contender.step() for contender in field] for _ in range(arguments.rounds + 1)][1:]
        for contender in field:
            contender.stop()
    console = Console(width=100, highlight=False)
    shape = f"{arguments.rows} x {counted(arguments.sequence_length, 'token')} a rank"
    console.print(f"{count_parameters(config.model).total / 1e6:.1f} M parameters, {shape}, one thread a rank")
    console.print(to_rich(summary(field, rounds)))


class Contender:
    """One or more processes that take a step at the same time when told to."""

    def __init__(self, name: str, makers: list[tuple[Callable[..., Step], tuple[Any, ...]]]) -> None:
        self.name = name
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        for maker, arguments in makers:
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, maker, arguments), daemon=True).start()
            theirs.close()  # so that the end of a process ends what waits for it
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()  # ready

    @property
    def ranks(self) -> int:
        return len(self._pipes)

    def step(self) -> tuple[float, float]:
        """Seconds of a step until its last rank is through, and the ranks' mean CPU seconds."""
        for pipe in self._pipes:
            pipe.send(True)
        walls, cpus = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return max(walls), statistics.mean(cpus)

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)


def on_one_rank(config: RunConfig, stages: list[int]) -> list[Contender]:
    """A bare loop first, then the engine at each stage."""
    bare = Contender("bare torch", [(bare_step, (config,))])
    return [bare, *(Contender(f"ZeRO {stage}", [(engine_step, (config, stage))]) for stage in stages)]


def on_ranks(config: RunConfig, stages: list[int], count: int, folder: str) -> list[Contender]:
    """One rank first, as many at once that know nothing of each other, then that many together at each stage."""
    alone = (engine_step, (config, 0))
    field = [Contender("1 rank", [alone]), Contender(f"{count} apart", [alone] * count)]
    for stage in stages:
        places = [(rank, count, f"{folder}/store-{stage}") for rank in range(count)]
        run_on_all_ranks = [(engine_step, (config, stage, place)) for place in places]
        field.append(Contender(f"{counted(count, 'rank')}, ZeRO {stage}", run_on_all_ranks))
    return field


def summary(field: list[Contender], rounds: list[list[tuple[float, float]]]) -> list[dict[str, object]]:
    """A line for each contender: medians, and medians of the ratios to the first."""
    lines: list[dict[str, object]] = []
    for place, contender in enumerate(field):
        walls, cpus = zip(*(steps[place] for steps in rounds), strict=True)
        ratios = [[steps[place][kind] / steps[0][kind] for steps in rounds] for kind in (0, 1)]
        line: dict[str, object] = {
            "": contender.name,
            "ms": round(statistics.median(walls) * 1e3),
            "CPU ms": round(statistics.median(cpus) * 1e3),
            "wall ratio": f"{statistics.median(ratios[0]):.3f}",
            "CPU ratio": f"{statistics.median(ratios[1]):.3f}",
        }
        if max(other.ranks for other in field) > 1:  # as many times the tokens in as many times the time: no gain
            line["efficiency"] = f"{1 / statistics.median(ratios[0]):.0%}"
        lines.append(line)
    return lines


def bare_step(config: RunConfig) -> Step:
    """Forward, backward, clipping, AdamW."""
    module, micro = assemble(config, Group(), CPU), one_micro_batch(config, 0)
    fill_(module, Group(), first_weights(config))
    optimizer = build_adamw(module, config.optimizer)

    def step() -> None:
        module(micro).backward()
        nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(config: RunConfig, stage: int, place: Place | None = None) -> Step:
    """The same through the engine, with the project's own settings of that stage."""
    from megahead.engine import Engine

    rank, count, store = place or (0, 1, "")
    if place:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    tree = config.model_dump(mode="json")
    tree["batch"]["global_size"] *= count
    tree["engine"]["deepspeed"] = str(SETTINGS / f"zero{stage}.json")
    config = config_from_dict(tree)
    mesh = Mesh.build(Group.world())
    module = assemble(config, mesh.tensor, CPU)
    optimizer = build_adamw(module, config.optimizer)
    settings, weights = deepspeed_config(config, count), first_weights(config)
    engine = Engine(module, optimizer=optimizer, config=settings, mesh=mesh, device=CPU, weights=weights)
    micro = one_micro_batch(config, rank)

    def step() -> None:
        engine.micro_step(micro)
        engine.step(1e-3)

    return step


def one_micro_batch(config: RunConfig, rank: int) -> MicroBatch:
    """The rank's rows, of Zipf-distributed tokens."""
    rule = build_objective(config.objective, config.model.vocab_size)
    return micro_batch(config, rule, token_rows(config, None, count=rank + 1)[rank])


def make_config(rows: int, sequence_length: int, shape: dict[str, int]) -> RunConfig:
    """A headless run of `rows` rows a rank on a decoder of `shape`."""
    return config_from_dict(
        {
            "name": "bench",
            "model": shape,
            "data": {"train": "", "sequence_length": sequence_length},
            "batch": {"global_size": rows, "micro_size": rows},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 1},
        }
    )


def _serve(pipe: Connection, maker: Callable[..., Step], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    step = maker(*arguments)
    pipe.send("ready")
    while pipe.recv():
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        pipe.send((time.perf_counter() - wall, time.process_time() - cpu))


if __name__ == "__main__":
    run_command(main)
