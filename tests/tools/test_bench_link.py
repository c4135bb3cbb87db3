"""The benchmark of links steps real engines behind them, and counts what passes."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial

import pytest

from benchmarks import link
from benchmarks.command import build_config
from benchmarks.link import network_namespaces

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 20_000}


def may_link() -> bool:
    """Whether this machine lets a process make namespaces and limit their links."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    probe = "ip link add name probe type bridge && tc qdisc add dev probe root tbf rate 1mbit burst 1mb limit 10mb"
    return not subprocess.run(["unshare", "-n", "sh", "-c", probe], capture_output=True).returncode


pytestmark = pytest.mark.skipif(not may_link(), reason="needs root, ip and tc")


RATE = 200
"""Megabits a second."""


def test_each_way_is_timed_and_its_bytes_are_counted() -> None:
    ways = link.parse_ways("rows:0,dense:0,dense:3")
    lines = link.compare_variants(
        build_config(SHAPE, 2, 16, "engine.device=cpu"), [2], RATE, 2, partial(link.step_variants, ways)
    )
    assert [(line["embedding"], line["ZeRO"]) for line in lines] == ways == [("rows", 0), ("dense", 0), ("dense", 3)]
    rows, replicated, partitioned = (float(str(line["MB sent"])) for line in lines)
    table = 20_480 * 32 * 4 / 1e6
    assert rows < 0.1 * table
    assert table < replicated < 1.2 * table  # half of it there and half back, and a small body
    assert partitioned > replicated
    for line in lines[1:]:  # the link passes no more, but for what it may pass at once
        assert float(str(line["ms"])) / 1000 > 0.5 * float(str(line["MB sent"])) * 8 / RATE


def test_negatives_are_shared_as_ids_and_as_embeddings() -> None:
    ids, embeddings = link.compare_variants(
        build_config(SHAPE | {"hidden_size": 128}, 8, 64, "engine.device=cpu"), [2], 1000, 2, link.exchange_variants
    )
    assert (ids["negatives as"], embeddings["negatives as"]) == ("ids", "embeddings")
    sent = [float(str(line["MB sent"])) for line in (ids, embeddings)]
    assert sent[0] < 0.01
    rows = 8 * 64 * 128 * 4 / 1e6
    assert 2 * rows < sent[1] < 3.2 * rows  # there once; back once, or twice, as gloo scatters sums


def test_namespaces_are_gone_afterwards() -> None:
    with network_namespaces(2, 100) as names:
        there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert all(name in there for name in names)
    there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(name in there for name in names)
