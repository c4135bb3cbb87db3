"""Who is held to have waited for the GPU; that it counts is tested on one (tests/gpu)."""

from __future__ import annotations

import sys
from traceback import FrameSummary

from commands import ROOT, call
from count_waits import place

OURS = FrameSummary("/src/megahead/megahead/train/step.py", 52, "train_step")
THEIRS = FrameSummary("/venv/lib/deepspeed/runtime/engine.py", 9, "backward")
TORCH = FrameSummary("/venv/lib/torch/_tensor.py", 3, "item")
BACKWARD = FrameSummary("/venv/lib/torch/autograd/graph.py", 7, "_engine_run_backward")


def test_the_innermost_package_that_can_be_asked_waited() -> None:
    assert place([OURS, TORCH]) == ("megahead", "megahead/train/step.py:52 in train_step")
    assert place([OURS, THEIRS, TORCH]) == ("DeepSpeed", "deepspeed/runtime/engine.py:9 in backward")
    assert place([THEIRS, OURS]) == ("megahead", "megahead/train/step.py:52 in train_step")
    assert place([OURS, THEIRS, BACKWARD])[0] == "backward pass"
    assert place([OURS, THEIRS, BACKWARD, OURS])[0] == "megahead"  # a backward function of ours
    assert place([TORCH])[0] == "other"


def test_without_a_gpu_it_says_so() -> None:
    done = call(sys.executable, "tools/count_waits.py", "--config", f"{ROOT}/configs/pythia-70m-headless.yaml")
    assert done.returncode == 2
    assert done.stderr == "error: counting waits needs a CUDA device, but this machine has none.\n"
