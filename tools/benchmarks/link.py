"""Time and bytes sent by ranks in network namespaces, whose links have a limited rate.

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
from functools import partial
from pathlib import Path

import torch

from benchmarks.engines import (
    DEEPSPEED_CONFIGS,
    Rendezvous,
    StepFunction,
    StepProcesses,
    build_rank_step,
    init_distributed,
)
from benchmarks.rows import token_rows, with_overrides
from benchmarks.timing import run_interleaved
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.errors import UserError
from megahead.objectives.loader import gather_targets

LINK = "eth0"
_CLONE_NEWNET = 0x40000000
_SENT_BYTES_COLUMN = 8  # in a line of /proc/PID/net/dev


@contextmanager
def network_namespaces(count: int, megabits: int) -> Iterator[list[str]]:
    """Makes `count` namespaces on one switch, with links of that rate in both directions; yields their names."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise UserError("this benchmark needs root and iproute2 (ip, tc) to limit links, but one of them is missing.")
    prefix = f"megahead-{os.getpid()}"
    switch, namespaces = f"{prefix}-hub", [f"{prefix}-{rank}" for rank in range(count)]
    try:
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add name switch type bridge")
        _run(f"ip -n {switch} link set switch up")
        limit = f"root tbf rate {megabits}mbit burst 1mb limit 10mb"
        for rank, namespace in enumerate(namespaces):
            _run(f"ip netns add {namespace}")
            _run(f"ip -n {switch} link add name port{rank} type veth peer name {LINK} netns {namespace}")
            _run(f"ip -n {switch} link set port{rank} master switch up")
            _run(f"ip -n {namespace} addr add 10.77.0.{rank + 1}/24 dev {LINK}")
            for device in (LINK, "lo"):
                _run(f"ip -n {namespace} link set {device} up")
            _run(f"tc -n {namespace} qdisc add dev {LINK} {limit}")
            _run(f"tc -n {switch} qdisc add dev port{rank} {limit}")
        yield namespaces
    finally:
        for name in (*namespaces, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def enter_namespace(namespace: str) -> None:
    """Moves this process, which has one thread, to a network namespace, and has gloo use its link."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


def sent_bytes(process: int | None) -> int:
    """Bytes sent so far through the link of a process's namespace, headers included."""
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    counters = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{LINK}:"))
    return int(counters[_SENT_BYTES_COLUMN])


def _run(command: str) -> None:
    result = subprocess.run(command.split(), capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"`{command}` must work, but does not ({result.stderr.strip()}).")


EmbeddingAndStage = tuple[str, int]  # rows or dense, and ZeRO stage
Row = dict[str, object]
StepBuilder = Callable[[Rendezvous, str], StepFunction]  # of a rank in its namespace, in a new process of one thread
Variant = tuple[Row, StepBuilder]  # its columns of the table, and its steps
Variants = Callable[[RunConfig, int, int], Iterable[Variant]]


def compare_variants(
    config: RunConfig, rank_counts: list[int], megabits: int, steps: int, variants: Variants
) -> list[Row]:
    """Measures each variant on each number of ranks; returns a row for each."""
    rows: list[Row] = []
    for count in rank_counts:
        with network_namespaces(count, megabits) as namespaces:
            for columns, build_step in variants(config, count, steps):
                rows.append({"ranks": count, **columns, **_measure(build_step, namespaces, steps)})
    return rows


def step_variants(ways: Sequence[EmbeddingAndStage], config: RunConfig, ranks: int, steps: int) -> Iterator[Variant]:
    """Whole steps, by embedding and ZeRO stage."""
    for embedding, stage in ways:
        engine = (f"engine.embedding={embedding}", f"engine.deepspeed={DEEPSPEED_CONFIGS / f'zero{stage}.json'}")
        variant = with_overrides(config, f"batch.global_size={ranks * config.batch.micro_size}", *engine)
        yield {"embedding": embedding, "ZeRO": stage}, partial(build_linked_step, variant, steps + 1)


def exchange_variants(config: RunConfig, ranks: int, steps: int) -> Iterator[Variant]:
    """Exchanges a micro-batch's negatives of each rank: as ids, like a run, and as embeddings, with their gradients."""
    targets = config.batch.micro_size * config.data.sequence_length
    for form in ("ids", "embeddings"):
        columns: Row = {"negatives as": form, "targets a rank": targets}
        yield columns, partial(build_exchange, form, targets, config.model.hidden_size)


def _measure(build_step: StepBuilder, namespaces: list[str], steps: int) -> Row:
    """Medians over steps; bytes are those of the rank that sends most."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [((rank, len(namespaces), f"{folder}/store"), name) for rank, name in enumerate(namespaces)]
        variant = StepProcesses([partial(build_step, *rank) for rank in ranks])

        def sent() -> list[int]:
            return [sent_bytes(process.pid) for process in variant.processes]

        def step() -> tuple[float, int]:
            before, seconds = sent(), variant.step()[0]
            return seconds, max(end - start for start, end in zip(before, sent(), strict=True))

        seconds, max_sent = zip(*(measured for (measured,) in run_interleaved([step], steps)), strict=True)
        variant.stop()
    return {"MB sent": f"{statistics.median(max_sent) / 1e6:,.2f}", "ms": round(statistics.median(seconds) * 1e3)}


def build_linked_step(config: RunConfig, steps: int, rendezvous: Rendezvous, namespace: str) -> StepFunction:
    """A step of this rank; each call reads other rows."""
    enter_namespace(namespace)
    _, world_size, _ = rendezvous
    return build_rank_step(config, rendezvous, token_rows(config, None, count=world_size * steps), torch.device("cpu"))


def build_exchange(form: str, targets: int, features: int, rendezvous: Rendezvous, namespace: str) -> StepFunction:
    """The exchange of this rank's negatives, `ids` as by a run's candidate groups, `embeddings` by an all-gather of
    fp32 rows and a reduce-scatter of their gradients."""
    enter_namespace(namespace)
    init_distributed(rendezvous)
    group, rows_ND = Group.world(), torch.randn(targets, features)
    target_ids, counts_RA = [torch.arange(targets)], torch.full((group.size, 1), targets)  # A = 1 micro-batch a rank

    def exchange() -> None:
        if form == "ids":
            gather_targets(target_ids, counts_RA, group)
        else:
            group.reduce_scatter(group.all_gather(rows_ND).flatten(0, 1))

    return exchange


def parse_ways(text: str) -> list[EmbeddingAndStage]:
    """Parses `rows:0,dense:3`."""
    return [(embedding, int(stage)) for embedding, _, stage in (way.partition(":") for way in text.split(","))]
