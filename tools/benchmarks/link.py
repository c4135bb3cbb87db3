"""Steps of ranks that a link of a given rate joins, their embedding in rows or dense: time, and bytes sent."""

from __future__ import annotations

import statistics
import tempfile

import torch
from rich.console import Console

from benchmarks.engines import SETTINGS, Contender, Step, rank_step
from benchmarks.network import enter, linked, sent_bytes
from benchmarks.tokens import token_rows
from megahead.config import RunConfig, config_from_dict
from megahead.report import to_rich

CPU = torch.device("cpu")

WAYS = (("rows", 0), ("dense", 0), ("dense", 3))
"""Embedding and ZeRO stage."""


def compare(config: RunConfig, ranks: list[int], megabits: int, steps: int) -> list[dict[str, object]]:
    """Measures all ways on each number of ranks, one after the other, and tells; the table's lines."""
    lines: list[dict[str, object]] = []
    for count in ranks:
        with linked(count, megabits) as namespaces:
            lines += [_measured(_under(config, count, *way), way, namespaces, steps) for way in WAYS]
    Console(highlight=False).print(to_rich(lines))
    return lines


def _measured(config: RunConfig, way: tuple[str, int], namespaces: list[str], steps: int) -> dict[str, object]:
    """Medians over steps; bytes are those of the rank that sent most."""
    count = len(namespaces)
    with tempfile.TemporaryDirectory() as folder:
        places = [(config, rank, count, f"{folder}/store", namespaces[rank], steps + 1) for rank in range(count)]
        contender = Contender("", [(linked_step, place) for place in places])
        seconds: list[float] = []
        sent: list[int] = []
        for _ in range(steps + 1):
            before = [sent_bytes(process.pid) for process in contender.processes]
            seconds.append(contender.step()[0])
            after = [sent_bytes(process.pid) for process in contender.processes]
            sent.append(max(b - a for a, b in zip(before, after, strict=True)))
        contender.stop()
    return {
        "ranks": count,
        "embedding": way[0] if way[0] == "rows" else f"{way[0]}, ZeRO {way[1]}",
        "MB sent a step": f"{statistics.median(sent[1:]) / 1e6:,.2f}",
        "ms": round(statistics.median(seconds[1:]) * 1e3),
    }


def linked_step(config: RunConfig, rank: int, count: int, store: str, namespace: str, steps: int) -> Step:
    """In a fresh process of one thread: a step of this rank, each time with another text."""
    enter(namespace)
    return rank_step(config, (rank, count, store), token_rows(config, None, count=count * steps), CPU)


def _under(config: RunConfig, ranks: int, embedding: str, stage: int) -> RunConfig:
    tree = config.model_dump(mode="json")
    tree["batch"]["global_size"] = ranks * config.batch.micro_size
    tree["engine"] |= {"embedding": embedding, "deepspeed": str(SETTINGS / f"zero{stage}.json")}
    return config_from_dict(tree)
