"""Steps of a bare torch loop or of the engine, each in processes of its own that take a step on request.

DeepSpeed changes what it is imported into; and a process that has computed cannot be forked. They run on the device of
`engine.device`, which must be cpu or cuda here; for CUDA they are spawned, which no state of its own can disturb.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.rows import changed, micro_batch, rule_of, token_rows
from benchmarks.timing import cost, interleaved
from megahead.config.embedding import shards_embedding
from megahead.config.plan import RunPlan, deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import assemble, fill_, initial_weights
from megahead.optim import build_optimizer
from megahead.sharded_embedding.table import plan_rows
from megahead.wording import pluralize, to_milliseconds

if TYPE_CHECKING:
    from megahead.engine.engine import Engine

Step = Callable[[], None]
Rows = np.ndarray[Any, Any]  # int64 [B, T+1]: the ids of a micro-batch
Place = tuple[int, int, str]  # rank, number of ranks, and a file at which they meet
SETTINGS = Path(__file__).resolve().parents[2] / "configs/deepspeed"


class Variant:
    """One or more processes that take a step at the same time on request."""

    def __init__(
        self, name: str, makers: list[tuple[Callable[..., Step], tuple[Any, ...]]], device: str = "cpu"
    ) -> None:
        context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self.name, self.ranks = name, len(makers)
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for maker, arguments in makers:
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=_serve, args=(theirs, maker, arguments), daemon=True))
            self.processes[-1].start()
            theirs.close()  # so that the end of a process ends what waits for it
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()  # ready

    def step(self) -> tuple[float, float]:
        """Seconds of a step until its last rank is through, and the ranks' mean CPU seconds."""
        for pipe in self._pipes:
            pipe.send("step")
        walls, cpus = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return max(walls), mean(cpus)

    def peak(self) -> float:
        """MiB that a step takes beside what lies there between steps, on the rank that takes most; on CPUs."""
        for pipe in self._pipes:
            pipe.send("measure")
        return max(float(pipe.recv()) for pipe in self._pipes)

    def stop(self) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            pipe.send("stop")
            process.join()


Rounds = list[list[tuple[float, float]]]  # of each round and variant: seconds, and CPU seconds


def interleaved_steps(variants: Sequence[Variant], rounds: int) -> Rounds:
    """After one step of each that is not counted."""
    return interleaved([lambda _, one=one: one.step() for one in variants], rounds)  # type: ignore[misc]


def compared(rounds: Rounds, place: int) -> dict[str, object]:
    """Medians of a variant's seconds and CPU seconds, and of their ratios to the first variant's in each round."""
    taken = [(steps[place], steps[0]) for steps in rounds]
    medians = {
        f"{name}ms": to_milliseconds(median(own[kind] for own, _ in taken)) for kind, name in enumerate(("", "CPU "))
    }
    ratios = {
        name: median(own[kind] / first[kind] for own, first in taken) for kind, name in enumerate(("wall", "CPU"))
    }
    return medians | {f"{name} ratio": f"{ratio:.3f}" for name, ratio in ratios.items()}


def time_engines(config: RunConfig, stages: Sequence[int], ranks: int, rounds: int) -> list[dict[str, object]]:
    """Times steps of the engine at each stage, on one rank beside a bare loop, on several beside one rank and beside as
    many at once that know nothing of each other; returns a line for each."""
    device, alone = config.engine.device, (engine_step, (config, 0))
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            variants = [Variant("bare torch", [(bare_step, (config,))], device)]
            variants += [Variant(f"ZeRO {stage}", [(engine_step, (config, stage))], device) for stage in stages]
        else:
            variants = [Variant("1 rank", [alone]), Variant(f"{ranks} apart", [alone] * ranks)]
            for stage in stages:
                places = [(rank, ranks, f"{folder}/store-{stage}") for rank in range(ranks)]
                together = [(engine_step, (config, stage, place)) for place in places]
                variants.append(Variant(f"{pluralize(ranks, 'rank')}, ZeRO {stage}", together))
        taken = interleaved_steps(variants, rounds)
        for variant in variants:
            variant.stop()
    lines = [{"": variant.name} | compared(taken, place) for place, variant in enumerate(variants)]
    if ranks > 1:  # as many times the tokens in as many times the time: no gain
        lines = [line | {"efficiency": f"{1 / float(str(line['wall ratio'])):.0%}"} for line in lines]
    return lines


def meet(place: Place) -> None:
    rank, count, store = place
    there = dist.FileStore(store, count)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=there, rank=rank, world_size=count)


def bare_step(config: RunConfig) -> Step:
    """Forward (in bf16 by autocast), backward, clipping, AdamW."""
    device, half = torch.device(config.engine.device), config.engine.precision == "bf16"
    module, micro = assemble(config, Group(), device), one_micro_batch(config, 0)
    fill_(module, Group(), initial_weights(config))
    optimizer = build_optimizer(module, config.optimizer)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
            loss = module(micro)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(config: RunConfig, stage: int, place: Place | None = None) -> Step:
    """The same through the engine, with the project's own settings of that stage."""
    rank, count, _ = place or (0, 1, "")
    if place:
        meet(place)
    rows, settings = config.batch.global_size * count, SETTINGS / f"zero{stage}.json"
    config = changed(config, f"batch.global_size={rows}", f"engine.deepspeed={settings}")
    mesh, device = Mesh.build(Group.world()), torch.device(config.engine.device)
    engine = build(config, mesh, device, deepspeed_config(config, count, device.type))
    micro = one_micro_batch(config, rank)

    def step() -> None:
        engine.micro_step(micro)
        engine.step(1e-3)

    return step


def build(config: RunConfig, mesh: Mesh, device: torch.device, settings: dict[str, Any]) -> Engine:
    """An engine by DeepSpeed's `settings`."""
    from megahead.engine.engine import Engine

    module = assemble(config, mesh.tensor_group, device)
    optimizer, weights = build_optimizer(module, config.optimizer), initial_weights(config)
    return Engine(module, optimizer=optimizer, config=settings, mesh=mesh, device=device, weights=weights)


def rank_step(config: RunConfig, place: Place, texts: Sequence[Rows], device: torch.device) -> Step:
    """A step of a run's engine on this rank, from the choice of its candidates on, each time on its next text.

    Of `texts` each rank takes its own, in turn.
    """
    from megahead.train.run import build_engine

    rank, count, _ = place
    if count > 1:
        meet(place)
    world = Group.world()
    plan = RunPlan.of(config, count, device.type)
    engine, _ = build_engine(plan, Mesh.build(world), device, initial_weights(config))
    rule, asking, half = rule_of(config, texts), world.new_gloo_group(), config.engine.precision != "fp32"
    mine = iter(texts[rank::count])

    def step() -> None:
        micro = micro_batch(config, rule, next(mine)).prepared_for(device, half)
        engine.prepare_step(plan_rows(micro.ids(), asking) if shards_embedding(config) else None)
        engine.micro_step(micro.to(device))
        engine.step(1e-3)

    return step


def one_micro_batch(config: RunConfig, rank: int) -> MicroBatch:
    """The rank's rows, of Zipf-distributed tokens, on its device."""
    rows, device = token_rows(config, None, count=rank + 1), torch.device(config.engine.device)
    return micro_batch(config, rule_of(config, rows), rows[rank]).prepared_for(device).to(device)


def _serve(pipe: Connection, maker: Callable[..., Step], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    step = maker(*arguments)
    pipe.send("ready")
    while (order := pipe.recv()) != "stop":
        if order == "measure":
            pipe.send(cost(step)[1])
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        pipe.send((time.perf_counter() - wall, time.process_time() - cpu))


def grow(
    config: RunConfig,
    vocabularies: Sequence[int],
    ranks: int,
    prefix: str | None,
    steps: int,
    device: torch.device,
    kinds: Sequence[str] = ("rows", "dense"),
) -> list[dict[str, object]]:
    """Times `steps` steps of `ranks` ranks under each vocabulary, its embedding dense or in rows, on ids that the
    smallest has; returns a line for each. A step before them warms up, one after says what memory it takes."""
    smallest = _under(config, min(vocabularies), "dense", ranks)
    texts = token_rows(smallest, prefix, count=(steps + 2) * ranks)
    lines: list[dict[str, object]] = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            variants: list[Variant] = []
            for size in vocabularies:
                under, store = _under(config, size, kind, ranks), f"{folder}/store-{size}"
                work = [(under, (rank, ranks, store), texts, device) for rank in range(ranks)]
                variants.append(Variant("", [(rank_step, one) for one in work], device.type))
            rounds = interleaved_steps(variants, steps)
            for place, (size, variant) in enumerate(zip(vocabularies, variants, strict=True)):
                lines.append({"embedding": kind, "vocabulary": size, **compared(rounds, place)})
                if device.type == "cpu":
                    lines[-1]["a step's MiB"] = round(variant.peak())
                variant.stop()
    return lines


def _under(config: RunConfig, vocabulary: int, kind: str, ranks: int) -> RunConfig:
    rows = config.batch.micro_size * ranks
    settings = (f"model.vocab_size={vocabulary}", f"engine.embedding={kind}", f"batch.global_size={rows}")
    return changed(config, *settings)
