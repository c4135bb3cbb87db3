"""What is saved comes back bit for bit, from any number of ranks, and old checkpoints go when told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from megahead.checkpoints.disk import DiskStorage, find_checkpoint
from megahead.checkpoints.reading import open_checkpoint
from megahead.checkpoints.store import RetentionRules, highest_step_first
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from support.forked import run_script
from support.named import folder_of, orphaned_steps, steps_of_history, without_digits
from support.on_ranks import on_ranks
from support.saved import save_checkpoint

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def save(root: Path, step: int, tensors: dict[str, Tensor], keep: int = 9, group: Group | None = None) -> Path:
    state = {"step": step, "tokens": 10 * step, "loss": 0.1}
    return save_checkpoint(
        root,
        step,
        tensors.items(),
        state=state,
        config={"name": "test"},
        group=group or Group(),
        rules=RetentionRules(keep),
    )


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Any bit patterns (nan too), any shapes (scalar and empty too), some transposed views of larger tensors."""
    names = draw(st.lists(st.text("abc./_é", min_size=1, max_size=8), unique=True, max_size=6))
    tensors = {}
    for name in names:
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = max(1, torch.Size(shape).numel()) * dtype.itemsize
        limit = 1 if dtype == torch.bool else 255
        raw = draw(st.lists(st.integers(0, limit), min_size=size, max_size=size))
        flat = torch.tensor(raw, dtype=torch.uint8).view(dtype)[: torch.Size(shape).numel()]
        tensors[name] = (
            flat.view(shape).transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else flat.view(shape)
        )
    return tensors


@settings(max_examples=60, deadline=None)
@given(tensors=named_tensors())
def test_any_tensors_come_back_bit_for_bit(
    tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = open_checkpoint(save(tmp_path_factory.mktemp("any"), 3, tensors))
    assert checkpoint.names() == list(tensors)
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape, bits(read)) == (tensor.dtype, tensor.shape, bits(tensor))
    checkpoint.verify()


def some_tensors(count: int = 10) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {f"weight/{i}": torch.randn(1 + 7 * i, 3, generator=g) for i in range(count)}


def save_on_ranks(group: Group, root: str, tensors: dict[str, Tensor]) -> str:
    return save(Path(root), 5, tensors, group=group).name


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_bytes_evenly_and_one_process_reads_all(ranks: int, tmp_path: Path) -> None:
    tensors = some_tensors()
    names = on_ranks(ranks, save_on_ranks, str(tmp_path), tensors)
    assert names == [names[0]] * ranks
    assert without_digits(names[0]) == "step-00000005"
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.state["tokens"], checkpoint.config) == (5, 50, {"name": "test"})
    assert checkpoint.names() == list(tensors)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    assert len(checkpoint.files) == ranks
    largest = max(tensor.nbytes for tensor in tensors.values())
    loads = [
        sum(tensors[n].nbytes for n, e in checkpoint.tensors.items() if e.file == file) for file in checkpoint.files
    ]
    assert max(loads) - min(loads) <= largest


def test_each_tensor_lies_in_one_file(tmp_path: Path) -> None:
    tensors = some_tensors(9)
    on_ranks(4, save_on_ranks, str(tmp_path), tensors)
    held = []
    for path in open_checkpoint(tmp_path).folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            held += file.keys()
    assert sorted(held) == sorted(tensors)


def test_more_ranks_than_tensors(tmp_path: Path) -> None:
    on_ranks(4, save_on_ranks, str(tmp_path), some_tensors(2))
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.verify()
    assert len(checkpoint.names()) == 2


def test_the_newest_are_kept_and_what_lies_above_one_just_written_is_orphaned(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, some_tensors(1), keep=2)
    names = [without_digits(name) for name in sorted(p.name for p in tmp_path.iterdir())]
    assert names == ["latest", "step-00000020", "step-00000030"]
    save(tmp_path, 15, some_tensors(1), keep=1)  # a run that went back
    assert (steps_of_history(tmp_path), orphaned_steps(tmp_path)) == ([15], [20, 30])
    assert open_checkpoint(tmp_path).step == 15


def test_a_step_saved_again_replaces_itself(tmp_path: Path) -> None:
    save(tmp_path, 7, {"a": torch.zeros(3)})
    save(tmp_path, 7, {"b": torch.ones(2)})
    assert open_checkpoint(tmp_path).names() == ["b"]
    assert sorted(without_digits(p.name) for p in tmp_path.iterdir()) == ["latest", "step-00000007"]


def test_run_checkpoints_and_step_folders_all_mean_the_newest(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert find_checkpoint(tmp_path) is None
    first, second = save(root, 1, some_tensors(1)), save(root, 2, some_tensors(1))
    assert find_checkpoint(tmp_path) == find_checkpoint(root) == second
    assert find_checkpoint(first) == first
    assert find_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("lost", [Path.unlink, lambda file: os.truncate(file, 100)], ids=["missing", "truncated"])
@pytest.mark.parametrize("latest", [None, "step-00000009", "../elsewhere", "", b"\xff\xfe"])
def test_without_a_usable_latest_the_highest_complete_step_counts(
    latest: str | bytes | None, lost: Callable[[Path], None], tmp_path: Path
) -> None:
    second = save(tmp_path, 2, some_tensors(1))
    save(tmp_path, 3, some_tensors(1))
    lost(next(folder_of(tmp_path, 3).glob("tensors-*")))
    if latest is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_bytes(latest if isinstance(latest, bytes) else latest.encode())
    assert find_checkpoint(tmp_path) == second


def test_the_highest_step_comes_first_however_many_digits_it_has(tmp_path: Path) -> None:
    """And of two of one step the one that keeps its name."""
    names = ["step-100000000", "step-99999999", "step-00000020", "step-00000020.replaced", "step-00000003"]
    for name in [*sorted(names), "step-4", "step-00000004.partial", "abandoned-step-00000030"]:
        (tmp_path / name).mkdir()
    assert highest_step_first(DiskStorage(tmp_path).names()) == names


def test_slices_of_one_memory_are_saved_each_by_itself(tmp_path: Path) -> None:
    whole = torch.arange(1000.0)
    tensors = {"first": whole[:3], "overlapping": whole[2:6], "crossed": whole[:6].view(2, 3).T}
    checkpoint = open_checkpoint(save(tmp_path, 1, tensors))
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    assert sum(entry.bytes for entry in checkpoint.files.values()) < whole.nbytes


def test_an_unknown_tensor_is_reported(tmp_path: Path) -> None:
    save(tmp_path, 1, some_tensors(1))
    with pytest.raises(CheckpointError, match="must hold the tensor head, but does not"):
        open_checkpoint(tmp_path).read("head")


def inspect(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_script("tools/inspect_checkpoint.py", folder, "--tensors")


def test_the_inspector_tells_contents_and_verdict(tmp_path: Path) -> None:
    orphan = save(tmp_path, 5, some_tensors(1))
    folder = save(tmp_path, 4, some_tensors(2))
    valid = inspect(tmp_path)
    assert valid.returncode == 0, valid.stderr
    assert "step 4" in valid.stdout
    assert f"orphaned   {orphan}" in valid.stdout
    assert "weight/1  float32 [8, 3]" in valid.stdout
    assert "valid" in valid.stdout
    file = next(folder.glob("tensors-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    damaged = inspect(tmp_path)
    assert damaged.returncode == 2
    assert "valid" not in damaged.stdout
    assert damaged.stderr.startswith(f"error: `{file}` must match its checksum")


def test_files_may_be_read_by_whom_the_folder_lets_in(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        saved = save_checkpoint(tmp_path, 1, [("a", torch.ones(2))], state={}, config={}, group=Group())
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in saved.iterdir()} == {0o640}
    saved = save_checkpoint(tmp_path, 2, [("a", torch.ones(2))], state={}, config={}, group=Group())
    assert not any(path.stat().st_mode & 0o111 for path in saved.iterdir())  # a folder may be entered, a file not run
