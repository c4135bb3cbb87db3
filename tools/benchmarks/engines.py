"""Times kernel launches, and steps of a plain torch loop or of the engine, which run on request in child processes.

DeepSpeed patches the process that imports it, and a process that has computed with torch cannot be forked. Steps run on
`engine.device`, which must be cpu or cuda here; for CUDA the processes are spawned.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.rows import build_run_objective, micro_batch, token_rows, with_overrides
from benchmarks.timing import measure_cost, run_interleaved
from megahead.config.embedding import shards_embedding
from megahead.config.plan import RunPlan, deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.losses.candidates import all_rows_as_candidates
from megahead.losses.softmax import candidate_loss
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import build_parallel_model, initial_weights, load_weights_
from megahead.optim import build_optimizer
from megahead.sharded_embedding.table import plan_rows
from megahead.wording import to_milliseconds

if TYPE_CHECKING:
    from megahead.engine.engine import Engine

StepFunction = Callable[[], None]
TokenRows = np.ndarray[Any, Any]  # int64 [B, T+1]: the ids of a micro-batch
Rendezvous = tuple[int, int, str]  # rank, world size, and the path of the file store
DEEPSPEED_CONFIGS = Path(__file__).resolve().parents[2] / "configs/deepspeed"


class StepProcesses:
    """Each step builder runs in its own process. On request all processes run their steps at the same time."""

    def __init__(self, step_builders: Sequence[Callable[[], StepFunction]], device: str = "cpu") -> None:
        context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self._pipes, self.processes = list[Connection](), list[BaseProcess]()
        for build_step in step_builders:
            parent_end, child_end = context.Pipe()
            self.processes.append(context.Process(target=_serve, args=(child_end, build_step), daemon=True))
            self.processes[-1].start()
            child_end.close()  # so that recv fails when the process dies
            self._pipes.append(parent_end)
        for pipe in self._pipes:
            pipe.recv()  # ready

    def step(self) -> tuple[float, float]:
        """Seconds of a step on the slowest rank, and the ranks' mean CPU seconds."""
        for pipe in self._pipes:
            pipe.send("step")
        wall_seconds, cpu_seconds = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return max(wall_seconds), mean(cpu_seconds)

    def peak_mib(self) -> float:
        """MiB that a step allocates above the memory between steps, the most of any rank; on CPUs."""
        for pipe in self._pipes:
            pipe.send("measure")
        return max(float(pipe.recv()) for pipe in self._pipes)

    def stop(self) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            pipe.send("stop")
            process.join()


Rounds = list[list[tuple[float, float]]]  # [round][variant]: seconds, and CPU seconds


def _timing_columns(rounds: Rounds, index: int) -> dict[str, object]:
    """Medians of variant `index`: wall and CPU milliseconds, and their ratios to the first variant's in each round."""
    seconds_RVC = np.array(rounds)  # by round, variant and clock
    wall, cpu = np.median(seconds_RVC[:, index], axis=0).tolist()
    wall_ratio, cpu_ratio = np.median(seconds_RVC[:, index] / seconds_RVC[:, 0], axis=0)
    row: dict[str, object] = {"ms": to_milliseconds(wall), "CPU ms": to_milliseconds(cpu)}
    return row | {"wall ratio": f"{wall_ratio:.3f}", "CPU ratio": f"{cpu_ratio:.3f}"}


def time_engines(config: RunConfig, stages: Sequence[int], num_rounds: int) -> list[dict[str, object]]:
    """Times steps of a plain torch loop and of the engine at each ZeRO stage; returns a row for each."""
    builders = {"bare torch": partial(build_torch_step, config)}
    builders |= {f"ZeRO {stage}": partial(build_engine_step, config, stage) for stage in stages}
    variants = [StepProcesses([build_step], config.engine.device) for build_step in builders.values()]
    rounds = run_interleaved([variant.step for variant in variants], num_rounds)
    for variant in variants:
        variant.stop()
    return [{"": name} | _timing_columns(rounds, index) for index, name in enumerate(builders)]


def init_distributed(rendezvous: Rendezvous) -> None:
    rank, world_size, path = rendezvous
    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def build_torch_step(config: RunConfig) -> StepFunction:
    """A step of plain torch: forward (bf16 by autocast), backward, clipping, AdamW."""
    device, half = torch.device(config.engine.device), config.engine.precision == "bf16"
    module, micro = build_parallel_model(config, Group(), device), zipf_micro_batch(config)
    load_weights_(module, Group(), initial_weights(config))
    optimizer = build_optimizer(module, config.optimizer)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
            loss = module(micro)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_engine_step(config: RunConfig, stage: int) -> StepFunction:
    """The same step by the engine, with the project's DeepSpeed config of that stage."""
    config = with_overrides(config, f"engine.deepspeed={DEEPSPEED_CONFIGS / f'zero{stage}.json'}")
    mesh, device = Mesh.build(Group.world()), torch.device(config.engine.device)
    engine = build_engine(config, mesh, device, deepspeed_config(config, 1, device.type))
    micro = zipf_micro_batch(config)

    def step() -> None:
        engine.micro_step(micro)
        engine.step(1e-3)

    return step


def build_engine(config: RunConfig, mesh: Mesh, device: torch.device, settings: dict[str, Any]) -> Engine:
    """Builds an engine with DeepSpeed's `settings`."""
    from megahead.engine.engine import Engine

    module = build_parallel_model(config, mesh.tensor_group, device)
    optimizer, weights = build_optimizer(module, config.optimizer), initial_weights(config)
    return Engine(module, optimizer=optimizer, config=settings, mesh=mesh, device=device, weights=weights)


def build_rank_step(
    config: RunConfig, rendezvous: Rendezvous, rows_by_step: Sequence[TokenRows], device: torch.device
) -> StepFunction:
    """A step of a run's engine on this rank, including the choice of candidates; each call reads the next rows.

    Rank r of R reads `rows_by_step[r::R]`.
    """
    from megahead.train.run import build_engine as build_run_engine

    rank, world_size, _ = rendezvous
    if world_size > 1:
        init_distributed(rendezvous)
    world = Group.world()
    plan = RunPlan.of(config, world_size, device.type)
    engine, _ = build_run_engine(plan, Mesh.build(world), device, initial_weights(config))
    objective, row_group = build_run_objective(config, rows_by_step), world.new_gloo_group()
    half = config.engine.precision != "fp32"
    rank_rows = iter(rows_by_step[rank::world_size])

    def step() -> None:
        micro = micro_batch(config, objective, next(rank_rows)).prepare_for(device, half)
        engine.prepare_step(plan_rows(micro.ids(), row_group) if shards_embedding(config) else None)
        engine.micro_step(micro.to(device))
        engine.step(1e-3)

    return step


def zipf_micro_batch(config: RunConfig) -> MicroBatch:
    """A micro-batch of Zipf-distributed tokens, on the run's device."""
    (rows,), device = token_rows(config, None, count=1), torch.device(config.engine.device)
    return micro_batch(config, build_run_objective(config, [rows]), rows).prepare_for(device).to(device)


def _serve(pipe: Connection, build_step: Callable[[], StepFunction]) -> None:
    torch.set_num_threads(1)
    step = build_step()
    pipe.send("ready")
    while (request := pipe.recv()) != "stop":
        if request == "measure":
            pipe.send(measure_cost(step)[1])
            continue
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        step()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        pipe.send((time.perf_counter() - wall_start, time.process_time() - cpu_start))


def time_vocabularies(
    config: RunConfig,
    vocabularies: Sequence[int],
    ranks: int,
    prefix: str | None,
    steps: int,
    device: torch.device,
    embeddings: Sequence[str] = ("rows", "dense"),
) -> list[dict[str, object]]:
    """Times `steps` steps of `ranks` ranks with each vocabulary size and kind of embedding; returns a row for each.

    All read ids of the smallest vocabulary. A warm-up step comes first, a step with measured memory last."""
    smallest = _config_with_vocabulary(config, min(vocabularies), "dense", ranks)
    rows_by_step = token_rows(smallest, prefix, count=(steps + 2) * ranks)
    rows: list[dict[str, object]] = []
    for embedding in embeddings:
        with tempfile.TemporaryDirectory() as folder:
            variants: list[StepProcesses] = []
            for size in vocabularies:
                sized = _config_with_vocabulary(config, size, embedding, ranks)
                rendezvous = [(rank, ranks, f"{folder}/store-{size}") for rank in range(ranks)]
                builders = [partial(build_rank_step, sized, one, rows_by_step, device) for one in rendezvous]
                variants.append(StepProcesses(builders, device.type))
            rounds = run_interleaved([variant.step for variant in variants], steps)
            for index, (size, variant) in enumerate(zip(vocabularies, variants, strict=True)):
                rows.append({"embedding": embedding, "vocabulary": size, **_timing_columns(rounds, index)})
                if device.type == "cpu":
                    rows[-1]["a step's MiB"] = round(variant.peak_mib())
                variant.stop()
    return rows


def _config_with_vocabulary(config: RunConfig, vocab_size: int, embedding: str, ranks: int) -> RunConfig:
    rows = config.batch.micro_size * ranks
    settings = (f"model.vocab_size={vocab_size}", f"engine.embedding={embedding}", f"batch.global_size={rows}")
    return with_overrides(config, *settings)


# The host's time to launch an operator, the replay of a CUDA graph, or the loss (on a GPU by the Triton kernel).

CALLS = 1000  # of an operator a round; few enough for a device's queue of launches
SIZE = 16  # small: the device is done before the next launch


def time_launches(device: torch.device, rounds: int) -> list[dict[str, object]]:
    """A row for each kind of launch: microseconds until the call returns, and until the device is done."""
    x = torch.zeros(SIZE, device=device)

    def add() -> None:
        for _ in range(CALLS):
            x.add_(1)

    kinds: dict[str, Callable[[], object]] = {f"operator, {CALLS:,} a call": add}
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add()
        kinds[f"graph of {CALLS:,} operators"] = graph.replay
    outputs_ND, rows_UD = (torch.randn(SIZE, SIZE, device=device, requires_grad=True) for _ in range(2))
    candidates = all_rows_as_candidates(torch.arange(SIZE, device=device))
    name = f"loss of {SIZE} outputs, forward and backward"
    kinds[name] = lambda: candidate_loss(outputs_ND, rows_UD, candidates).backward()
    taken = run_interleaved([partial(_time_launch, call, device) for call in kinds.values()], rounds, warm_up=3)
    medians = (1e6 * np.median(np.array(taken), axis=0)).round(1).tolist()  # microseconds
    return [
        {"": name, "host, us a call": host, "with the device": both}
        for name, (host, both) in zip(kinds, medians, strict=True)
    ]


def _time_launch(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds until the call returns, and until the device is done."""
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return returned - start, time.perf_counter() - start
