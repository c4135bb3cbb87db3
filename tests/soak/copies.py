"""Times steps with copies of the state in the memory of other nodes, with checkpoints as often, and with neither.

OMP_NUM_THREADS=1 PYTHONPATH=.:tests python tests/soak/copies.py --ranks 2 --every 10

The demo's model on made-up text, trained by ranks that are processes of this machine, each as if on a node of its own;
what they send stays on it. Beside copies: checkpoints written as often in the background. Training stands still for
`stall`, and goes on more slowly while the rest is done; a step is the mean over all, stalls included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from megahead.checkpoints import memory as node_memory
from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from megahead.distributed.launch import Launch
from megahead.errors import UserError, existing_path, run_command
from megahead.report.tables import terminal, to_json, to_rich
from megahead.train.run import pretrain
from soak.node_loss import ROOT, made_up_text
from support.commands import free_port

WARM_UP = 5
"""Steps that are not counted."""

Line = dict[str, object]


def compare(folder: Path, config: str, ranks: int, steps: int, every: int, zero: int) -> list[Line]:
    """Runs all three, one after the other, and tells; the table's lines."""
    text = made_up_text(folder / "text")
    ways = {
        "neither": [],
        f"a copy every {every} steps": [f"training.replicate_every={every}"],
        f"a checkpoint every {every} steps": [f"training.checkpoint_every={every}", "training.save_in_background=true"],
    }
    common = [
        f"data.train={text}",
        *(
            "data.validation=null",
            "data.tokenizer=null",
            "training.log_seconds=0",
            "engine.device=cpu",
            "schedule.warmup_steps=2",
        ),
        *(f"training.steps={steps}", f"training.checkpoint_every={10 * steps}"),
        f"engine.deepspeed={ROOT}/configs/deepspeed/zero{zero}.json",
    ]
    lines = []
    for number, (name, changes) in enumerate(ways.items()):
        settings = [*common, f"output_dir={folder / f'run-{number}'}", *changes]
        lines.append({"": name, **_measured(load_config(config, settings), ranks)})
        print(json.dumps(lines[-1]), flush=True)
    terminal().print(to_rich(lines))
    return lines


def _measured(config: RunConfig, ranks: int) -> Line:
    memories = [node_memory.ROOT / f"megahead-bench-{os.getpid()}-{rank}" for rank in range(ranks)]
    most = 0
    try:
        running = _start(config, memories)
        while any(rank.is_alive() for rank in running):
            most = max(most, sum(map(_size, memories)))
            time.sleep(0.02)
        if any(rank.exitcode for rank in running):
            raise UserError(f"all ranks must end well, but did not; see {config.folder()}.")
    finally:
        for memory in memories:
            shutil.rmtree(memory, ignore_errors=True)
    return _told(config, most / ranks)


def _start(config: RunConfig, memories: list[Path]) -> list[BaseProcess]:
    context = multiprocessing.get_context("spawn")
    port = int(free_port())
    launches = [Launch(rank, len(memories), rank, "127.0.0.1", port) for rank in range(len(memories))]
    places = zip(launches, memories, strict=True)
    ranks: list[BaseProcess] = [context.Process(target=_rank, args=(config, *place)) for place in places]
    for rank in ranks:
        rank.start()
    return ranks


def _rank(config: RunConfig, launch: Launch, memory: Path) -> None:
    memory.mkdir()
    node_memory.ROOT = memory
    torch.set_num_threads(1)
    pretrain(config, launch)


def _size(folder: Path) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed meanwhile
                size += Path(place, name).stat().st_blocks * 512
    return size


def _told(config: RunConfig, bytes_a_node: float) -> Line:
    records = [json.loads(line) for line in config.folder().metrics.read_text(encoding="utf-8").splitlines()]
    counted = [record for record in records if WARM_UP < record["step"] < config.training.steps]  # then it saves
    steps = [record["step_seconds"] for record in counted if "loss" in record]
    kept: list[dict[str, Any]] = [
        record[kind] for kind in ("copy", "checkpoint") for record in counted if kind in record
    ]
    stalls = [each["stall_seconds"] for each in kept if "stall_seconds" in each]
    total = statistics.fmean(steps) + sum(stalls) / len(steps)
    return {
        "step, ms": round(total * 1e3),
        "of it stalls": round(sum(stalls) / len(steps) * 1e3),
        "stall, ms": round(statistics.median(stalls) * 1e3) if stalls else 0,
        "left out": max((each.get("skipped", 0) for each in kept), default=0),
        "state, MB": round(max((each.get("bytes", 0) for each in kept), default=0) / 1e6, 1),
        "most in memory a node, MB": round(bytes_a_node / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default: 60)")
    parser.add_argument("--every", type=int, default=10, help="steps between copies (default: 10)")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage (default: 1)")
    parser.add_argument(
        "--config", type=existing_path, default="configs/demo-headless.yaml", help="another run's YAML file"
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the table's lines there")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        lines = compare(
            Path(folder), str(arguments.config), arguments.ranks, arguments.steps, arguments.every, arguments.zero
        )
    if arguments.output:
        arguments.output.write_text(to_json(lines), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
