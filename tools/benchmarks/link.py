"""Steps of ranks that a link of a given rate joins, and exchanges of their negatives: time, and bytes sent."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engines import SETTINGS, Contender, Step, rank_step
from benchmarks.network import enter, linked, sent_bytes
from benchmarks.tokens import token_rows
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.objectives.loader import gather_targets
from megahead.report.tables import to_rich
from megahead.terminal import terminal

CPU = torch.device("cpu")

Way = tuple[str, int]
"""Embedding (rows or dense) and ZeRO stage."""

Line = dict[str, object]


def compare(config: RunConfig, ranks: list[int], megabits: int, steps: int, ways: list[Way]) -> list[Line]:
    """Measures steps of all ways on each number of ranks, one after the other, and tells; the table's lines."""
    lines: list[Line] = []
    for count in ranks:
        with linked(count, megabits) as namespaces:
            for embedding, stage in ways:
                under = _under(config, count, embedding, stage)
                named = {"ranks": count, "embedding": embedding, "ZeRO": stage}
                lines.append(named | _measured(linked_step, (under, steps + 1), namespaces, steps))
    terminal().print(to_rich(lines))
    return lines


def compare_negatives(config: RunConfig, ranks: list[int], megabits: int, steps: int) -> list[Line]:
    """The same of what it takes to share the negatives of one micro-batch a rank: as ids, which is what runs do, and
    as their embeddings, whose gradients must go back."""
    targets = config.batch.micro_size * config.data.sequence_length
    lines: list[Line] = []
    for count in ranks:
        with linked(count, megabits) as namespaces:
            for shared in EXCHANGES:
                named = {"ranks": count, "negatives as": shared, "targets a rank": targets}
                exchange = (shared, targets, config.model.hidden_size)
                lines.append(named | _measured(linked_exchange, exchange, namespaces, steps))
    terminal().print(to_rich(lines))
    return lines


def _measured(maker: Callable[..., Step], given: tuple[Any, ...], namespaces: list[str], steps: int) -> Line:
    """Medians over steps; bytes are those of the rank that sent most."""
    count = len(namespaces)
    with tempfile.TemporaryDirectory() as folder:
        places = [(*given, rank, count, f"{folder}/store", namespaces[rank]) for rank in range(count)]
        contender = Contender("", [(maker, place) for place in places])
        seconds: list[float] = []
        sent: list[int] = []
        for _ in range(steps + 1):
            before = [sent_bytes(process.pid) for process in contender.processes]
            seconds.append(contender.step()[0])
            after = [sent_bytes(process.pid) for process in contender.processes]
            sent.append(max(b - a for a, b in zip(before, after, strict=True)))
        contender.stop()
    return {
        "MB sent": f"{statistics.median(sent[1:]) / 1e6:,.2f}",
        "ms": round(statistics.median(seconds[1:]) * 1e3),
    }


def linked_step(config: RunConfig, steps: int, rank: int, count: int, store: str, namespace: str) -> Step:
    """In a fresh process of one thread: a step of this rank, each time with another text."""
    enter(namespace)
    return rank_step(config, (rank, count, store), token_rows(config, None, count=count * steps), CPU)


def linked_exchange(
    shared: str, targets: int, features: int, rank: int, count: int, store: str, namespace: str
) -> Step:
    """In a fresh process of one thread: what this rank sends and receives to share its negatives."""
    enter(namespace)
    meeting = dist.FileStore(store, count)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=count)
    return EXCHANGES[shared](targets, features, Group.world())


def _ids(targets: int, features: int, ranks: Group) -> Step:
    """As a run's candidate groups do."""
    mine, counts_RA = [torch.arange(targets)], torch.full((ranks.size, 1), targets)

    def exchange() -> None:
        gather_targets(mine, counts_RA, ranks)

    return exchange


def _embeddings(targets: int, features: int, ranks: Group) -> Step:
    """Rows to all ranks, in fp32; the sum of their gradients back to those they came from."""
    rows_ND = torch.randn(targets, features)

    def exchange() -> None:
        gathered_RND: Tensor = ranks.all_gather(rows_ND)
        ranks.reduce_scatter(gathered_RND.flatten(0, 1))

    return exchange


EXCHANGES: dict[str, Callable[[int, int, Group], Step]] = {"ids": _ids, "embeddings": _embeddings}


def read_ways(given: str) -> Iterator[Way]:
    """Of `rows:0,dense:3` and so on."""
    for way in given.split(","):
        embedding, _, stage = way.partition(":")
        yield embedding, int(stage)


def _under(config: RunConfig, ranks: int, embedding: str, stage: int) -> RunConfig:
    tree = config.model_dump(mode="json")
    tree["batch"]["global_size"] = ranks * config.batch.micro_size
    tree["engine"] |= {"embedding": embedding, "deepspeed": str(SETTINGS / f"zero{stage}.json")}
    return config_from_dict(tree)
