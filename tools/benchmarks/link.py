"""Steps of ranks in network namespaces, each behind a link of a given rate: time, and bytes sent.

Needs root, and iproute2's ip and tc.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines import SETTINGS, Step, Variant, meet, rank_step
from benchmarks.rows import changed, token_rows
from benchmarks.timing import interleaved
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.errors import UserError
from megahead.objectives.loader import gather_targets

LINK = "eth0"
_CLONE_NEWNET = 0x40000000
_SENT = 8  # of the numbers in a line of /proc/PID/net/dev


@contextmanager
def linked(count: int, megabits: int) -> Iterator[list[str]]:
    """Names of `count` namespaces at one switch; what goes to or comes from each passes a link of that rate."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise UserError("this benchmark needs root and iproute2 (ip, tc) to limit links, but one of them is missing.")
    prefix = f"megahead-{os.getpid()}"
    hub, ends = f"{prefix}-hub", [f"{prefix}-{k}" for k in range(count)]
    try:
        _call(f"ip netns add {hub}")
        _call(f"ip -n {hub} link add name switch type bridge")
        _call(f"ip -n {hub} link set switch up")
        shape = f"root tbf rate {megabits}mbit burst 1mb limit 10mb"
        for k, end in enumerate(ends):
            _call(f"ip netns add {end}")
            _call(f"ip -n {hub} link add name port{k} type veth peer name {LINK} netns {end}")
            _call(f"ip -n {hub} link set port{k} master switch up")
            _call(f"ip -n {end} addr add 10.77.0.{k + 1}/24 dev {LINK}")
            for device in (LINK, "lo"):
                _call(f"ip -n {end} link set {device} up")
            _call(f"tc -n {end} qdisc add dev {LINK} {shape}")
            _call(f"tc -n {hub} qdisc add dev port{k} {shape}")
        yield ends
    finally:
        for name in (*ends, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def enter(namespace: str) -> None:
    """From here on this process, which has one thread, has no network but that namespace's, gloo too."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


def sent_bytes(process: int | None) -> int:
    """Bytes that have left through the link of a process's namespace so far, all headers included."""
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    numbers = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{LINK}:"))
    return int(numbers[_SENT])


def _call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"`{command}` must work, but does not ({done.stderr.strip()}).")


CPU = torch.device("cpu")

Way = tuple[str, int]  # embedding (rows or dense) and ZeRO stage
Line = dict[str, object]
Entry = tuple[Line, Callable[..., Step], tuple[Any, ...]]  # what a line says of it, what makes its step, and of what
Variants = Callable[[RunConfig, int, int], Iterable[Entry]]


def compare(config: RunConfig, ranks: list[int], megabits: int, steps: int, variants: Variants) -> list[Line]:
    """Measures each of the variants on each number of ranks, in turn; returns a line for each."""
    lines: list[Line] = []
    for count in ranks:
        with linked(count, megabits) as namespaces:
            for about, maker, given in variants(config, count, steps):
                lines.append({"ranks": count, **about, **_measured(maker, given, namespaces, steps)})
    return lines


def steps_by(ways: Sequence[Way], config: RunConfig, ranks: int, steps: int) -> Iterator[Entry]:
    """Whole steps, by each way."""
    for embedding, stage in ways:
        engine = (f"engine.embedding={embedding}", f"engine.deepspeed={SETTINGS / f'zero{stage}.json'}")
        by_way = changed(config, f"batch.global_size={ranks * config.batch.micro_size}", *engine)
        yield {"embedding": embedding, "ZeRO": stage}, linked_step, (by_way, steps + 1)


def exchanges(config: RunConfig, ranks: int, steps: int) -> Iterator[Entry]:
    """What it takes to share the negatives of one micro-batch a rank: as ids, which is what runs do, and as their
    embeddings, whose gradients must go back."""
    targets = config.batch.micro_size * config.data.sequence_length
    for shared in EXCHANGES:
        given = (shared, targets, config.model.hidden_size)
        yield {"negatives as": shared, "targets a rank": targets}, linked_exchange, given


def _measured(maker: Callable[..., Step], given: tuple[Any, ...], namespaces: list[str], steps: int) -> Line:
    """Medians over steps; bytes are those of the rank that sent most."""
    count = len(namespaces)
    with tempfile.TemporaryDirectory() as folder:
        places = [(*given, rank, count, f"{folder}/store", namespaces[rank]) for rank in range(count)]
        variant = Variant("", [(maker, place) for place in places])

        def sent() -> list[int]:
            return [sent_bytes(process.pid) for process in variant.processes]

        def step(_: int) -> tuple[float, int]:
            before, seconds = sent(), variant.step()[0]
            return seconds, max(b - a for a, b in zip(before, sent(), strict=True))

        seconds, most = zip(*(taken for (taken,) in interleaved([step], steps)), strict=True)
        variant.stop()
    return {"MB sent": f"{statistics.median(most) / 1e6:,.2f}", "ms": round(statistics.median(seconds) * 1e3)}


def linked_step(config: RunConfig, steps: int, rank: int, count: int, store: str, namespace: str) -> Step:
    """In a fresh process of one thread: a step of this rank, each time with another text."""
    enter(namespace)
    return rank_step(config, (rank, count, store), token_rows(config, None, count=count * steps), CPU)


def linked_exchange(
    shared: str, targets: int, features: int, rank: int, count: int, store: str, namespace: str
) -> Step:
    """In a fresh process of one thread: what this rank sends and receives to share its negatives."""
    enter(namespace)
    meet((rank, count, store))
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


def read_ways(given: str) -> list[Way]:
    """Of `rows:0,dense:3` and so on."""
    return [(embedding, int(stage)) for embedding, _, stage in (way.partition(":") for way in given.split(","))]
