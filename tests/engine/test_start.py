"""Starting needs no compiler and no launcher, and says nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megahead.distributed.group import Group
from megahead.engine.deepspeed import load_deepspeed
from megahead.errors import UserError
from support.on_ranks import on_ranks
from support.small_engine import small_batches, small_engine

TESTS = Path(__file__).resolve().parents[1]

TRAIN = """
import sys
sys.path.insert(0, {tests!r})
from support.small_engine import small_batches, small_engine
from megahead.distributed.group import Group
for stage, precision in [(0, "fp32"), (1, "bf16"), (3, "fp32")]:
    engine = small_engine(Group(), stage, precision)
    for batch in small_batches([3, 4], 1 / 7, seed=0):
        engine.micro_step(batch)
        assert engine.step(0.01).applied
assert "torch._inductor.compile_fx" not in sys.modules  # the compiler: a second of each start
print("trained")
"""


def python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


def test_a_bare_process_without_compiler_or_launcher_trains_in_silence(tmp_path: Path) -> None:
    built = tmp_path / "extensions"
    environment = {"PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(built), "HOME": str(tmp_path)}
    done = python(TRAIN.format(tests=str(TESTS)), {**environment, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert not built.exists() or not list(built.iterdir())


def test_importing_the_package_leaves_deepspeed_alone() -> None:
    code = "import sys, megahead.engine; print('deepspeed' in sys.modules)"
    assert python(code, dict(os.environ)).stdout == "False\n"


def programs_asked(group: Group) -> int:
    """How often a step of many buckets, and one more, start a program."""
    engine = small_engine(group, 3, accumulation=2, zero={"reduce_bucket_size": 10})
    asked: list[str] = []
    sys.addaudithook(lambda event, _: asked.append(event) if event == "subprocess.Popen" else None)
    for step in range(2):
        for batch in small_batches([3, 4], 1 / 7, seed=step):
            engine.micro_step(batch)
        assert engine.step(0.01).applied
    return len(asked)


def test_deepspeed_asks_for_the_processors_once_and_not_at_every_bucket() -> None:
    """By numactl, which may be missing; on a CPU."""
    (times,) = on_ranks(1, programs_asked)
    assert times <= 1


def test_a_forked_rank_collects_no_garbage_it_was_born_with() -> None:
    """Of the tests themselves: else DeepSpeed has each rank walk through, and thereby copy, all that is imported."""
    born_with = [[number] for number in range(50_000)]
    assert on_ranks(1, lambda _: len(gc.get_objects())) < [len(born_with) // 2]


def test_a_process_that_trained_on_one_kind_of_device_is_told_so_on_another() -> None:
    load_deepspeed(torch.device("cpu"))
    with pytest.raises(UserError, match=r"`engine\.device` must be cpu in this process, .* but is cuda instead"):
        load_deepspeed(torch.device("cuda", 0))
