"""Every way to compute a block trains what the CPU trains; and who makes the host wait for the device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.models.attention_backends import BACKENDS, AttentionSpec
from support.commands import ROOT
from support.gpu_run import curve, said
from support.small_run import stage, write_text

BF16 = {"engine.precision": "bf16"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"engine.compile": True},
        {"engine.compile": True, "engine.activation_checkpointing": True},
        {"engine.compile": "auto", "engine.attention": "varlen"},
        {"engine.activation_checkpointing": "selective"},
        *({"engine.attention": name} for name in BACKENDS),
    ],
)
def test_every_way_to_compute_a_block_gives_the_curve_of_the_cpu(tmp_path: Path, changes: dict[str, Any]) -> None:
    wanted = BACKENDS.get(changes.get("engine.attention", ""))
    reason = (
        wanted.unsupported_reason(AttentionSpec(torch.device("cuda"), torch.bfloat16, head_size=8)) if wanted else ""
    )
    if reason:
        pytest.skip(reason)
    write_text(tmp_path)
    cpu = curve(tmp_path, "cpu", stage(1))
    assert curve(tmp_path, "cuda", stage(1) | BF16 | changes) == pytest.approx(cpu, abs=0.1)


MASKS = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
ENCODER = {"model.family": "bert", "model.vocab_size": 63, "model.max_positions": 32}
LATE = ENCODER | {"masking": MASKS | {"masks_from_layer": 1}}
ADAPTED = ENCODER | {"masking": MASKS | {"strategy": "hardest", "adapt_every": 1000}}
"""Counts come to the host once a period."""

GRAPHS = {"engine.graphs": True, "data.isolate_documents": False}
"""One shape, which is captured before steps are counted."""

REPLACED = ENCODER | {"masking": MASKS, "objective.replaced_tokens": {"generator_layers": 1}}
"""How many are found comes with the losses."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("zero", "changes"), [(0, {}), (1, {}), (3, {}), (1, LATE), (1, ADAPTED), (1, REPLACED), (1, GRAPHS)], ids=str
)
def test_a_step_of_ours_waits_for_its_losses_and_its_norm_alone(
    tmp_path: Path, zero: int, changes: dict[str, Any]
) -> None:
    """How often DeepSpeed's waits, and torch's backward pass, is printed."""
    write_text(tmp_path)
    device = stage(zero) | BF16 | {"engine.device": "cuda"}
    told = said(str(ROOT / "tools/profile_step.py"), tmp_path / "counted", device | changes, "--waits")
    waits = {who: float(count) for who, count in re.findall(r"^([\w ]+): ([\d.]+) waits? a step", told, re.MULTILINE)}
    print(waits)
    assert waits["megahead"] <= 2, told
    assert not re.search(r"megahead/(data|losses|models|objectives|sharded_embedding)/", told), told
