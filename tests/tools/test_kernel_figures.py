"""The loss's kernel compiles for every architecture that it is meant for, without a device."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import kernels
from megahead.config.objective import GPU_CHUNKS
from megahead.distributed.group import Group
from megahead.estimate import count_parameters
from support.forked import ROOT
from support.on_ranks import on_ranks

pytest.importorskip("triton", reason="needs triton (the `test` extra, or torch for CUDA)")


def test_the_kernel_spills_nothing_leaves_room_for_many_programs_and_moves_16_bytes_at_once() -> None:
    """In an interpreter of its own: here Triton may be imported for interpreting, which compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "tools/kernel_figures.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    compiled = {(line[0], *line[1:-6]): [int(number.replace(",", "")) for number in line[-6:]] for line in lines[1:16]}
    assert {sm for sm, *_ in compiled} == {"80", "90", "100"}
    assert len(compiled) == 15
    for (_, *way), (registers, spilled, shared, blocks, load, store) in compiled.items():
        assert 0 < registers <= 64
        assert spilled == 0
        assert shared <= 1024
        assert blocks >= 8
        assert load == 16, "whatever the number of candidates"
        assert store == 16 or "residuals" not in way


@pytest.mark.parametrize("outputs", [4096, 16384, 65536])
@pytest.mark.parametrize(("candidates", "features"), [(1536, 512), (16384, 1024), (50304, 512), (262144, 1024)])
def test_a_loss_moves_less_than_the_plain_form_and_in_one_chunk_launches_nothing_more_but_its_mean(
    outputs: int, candidates: int, features: int
) -> None:
    """Twelve bytes a score, of which a GPU's cache may serve two, and not eighteen."""
    ours, plain = (
        kernels.count_loss(loss, outputs, candidates, features)
        for loss in (kernels.candidate_loss_on_gpu, kernels.plain_loss)
    )
    scores, one_chunk = outputs * candidates, 2 * outputs * candidates <= GPU_CHUNKS.score_bytes
    assert ours.bytes < 0.85 * plain.bytes
    assert not one_chunk or ours.operations <= plain.operations + 3
    assert not one_chunk or ours.bytes - 12 * scores <= 6 * 4 * (outputs + candidates) * features


def moved(group: Group, *stage: Any) -> float:
    """Bytes a parameter of a micro-step, but for the weights': 2 each, read in the forward and in the backward pass."""
    counter = kernels.count_engine_operations(*stage) if stage else kernels.count_model_operations()
    return counter.bytes / count_parameters(kernels._config(0).model).total - 4


def test_gradients_at_zero_1_move_12_bytes_a_parameter_and_micro_step_and_not_20() -> None:
    """One is written and added to its sum in float32 by one kernel; it is not cast before."""
    (alone,), (ours,), (immediate,) = (
        on_ranks(1, moved),
        on_ranks(1, moved, 1),
        on_ranks(1, moved, 1, kernels.IMMEDIATE_GRADIENT_SUMS),
    )
    assert alone == pytest.approx(2, abs=0.5)
    assert ours == pytest.approx(12, abs=0.5)
    assert immediate == pytest.approx(20, abs=0.5)
