"""The profiler writes a trace that a browser can open, and names what was done; who is held to have waited for the GPU:
that it counts is tested on one (tests/gpu)."""

from __future__ import annotations

import gzip
import json
import re
import warnings
from collections import Counter
from pathlib import Path
from traceback import FrameSummary

import torch
from profile_step import PACKAGE_ROOTS, count_waits, find_wait_site, record_waits

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from support.commands import config_file
from support.forked import run_script
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text

OURS = FrameSummary(str(PACKAGE_ROOTS["megahead"] / "train/step.py"), 52, "train_step")
THEIRS = FrameSummary(str(PACKAGE_ROOTS["deepspeed"] / "runtime/engine.py"), 9, "backward")
RECORDER = FrameSummary(str(PACKAGE_ROOTS["megahead"].parent / "tools/profile_step.py"), 4, "recorded")
TORCH = FrameSummary("/venv/lib/torch/_tensor.py", 3, "item")
BACKWARD = FrameSummary("/venv/lib/torch/autograd/graph.py", 7, "_engine_run_backward")


def test_the_innermost_package_that_can_be_asked_waited() -> None:
    assert find_wait_site([OURS, TORCH]) == ("megahead", "megahead/train/step.py:52 in train_step")
    assert find_wait_site([OURS, THEIRS, TORCH]) == ("DeepSpeed", "deepspeed/runtime/engine.py:9 in backward")
    assert find_wait_site([THEIRS, OURS]) == ("megahead", "megahead/train/step.py:52 in train_step")
    assert find_wait_site([OURS, THEIRS, BACKWARD])[0] == "backward pass"
    assert find_wait_site([OURS, THEIRS, BACKWARD, OURS])[0] == "megahead"  # a backward function of ours
    assert find_wait_site([TORCH])[0] == "other"
    assert find_wait_site([THEIRS, TORCH, RECORDER])[0] == "DeepSpeed"  # in a checkout that is called megahead, too


def test_without_a_gpu_it_says_so() -> None:
    done = run_script("tools/profile_step.py", "--config", "configs/pythia-70m-headless.yaml", "--waits")
    assert done.returncode == 2
    assert done.stderr == "error: the machine must have a CUDA device to count waits on, but has none.\n"


def test_warnings_and_explicit_waits_are_noted_inside_alone(monkeypatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    waits: Counter[tuple[str, str]] = Counter()
    with record_waits(waits):
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert sum(waits.values()) == 3
    assert modes == ["warn", "default"]


def steps_counted(group: Group, config: RunConfig) -> tuple[int, list[str]]:
    modes: list[str] = []
    torch.cuda.set_sync_debug_mode = modes.append
    return count_waits(config, 2).total(), modes


def test_steps_are_those_of_a_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(1, steps_counted, small_config(tmp_path)) == [(0, ["warn", "default"] * 2)]
    assert not (tmp_path / "run").exists()


def test_leaves_the_run_and_its_remote_checkpoints_alone(tmp_path: Path) -> None:
    write_text(tmp_path)
    changes = {"training.remote_checkpoints": f"file://{tmp_path}/store", "training.replicate_every": 1}
    changes |= {"training.wandb": "project", "training.keep_every": 1}
    assert on_ranks(1, steps_counted, small_config(tmp_path, changes)) == [(0, ["warn", "default"] * 2)]
    assert not (tmp_path / "store").exists()


def test_writes_a_trace_of_the_steps_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "traces/trace.json.gz"
    tool = ("tools/profile_step.py", "--config", config_file(tmp_path))
    done = run_script(*tool, "--steps", 2, "--output", trace)
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert {"step 1", "step 2"} <= set(names)
    assert "step 3" not in names
    assert re.search(r"aten::(mm|addmm|bmm) ", done.stdout), done.stdout
