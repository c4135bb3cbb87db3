"""The streamed file is an ordinary safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megahead.hf.export import StreamedTensor, write_safetensors, write_shards


def streamed(name: str, tensor: Tensor, rows: int) -> StreamedTensor:
    return StreamedTensor(name, tuple(tensor.shape), lambda: tensor.split(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reads_back_as_the_library_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"matrix": torch.randn(7, 5), "a.vector": torch.randn(3), "columns": torch.randn(5, 4).T}
    path = tmp_path / "model.safetensors"
    write_safetensors(path, [streamed(name, tensor, rows=2) for name, tensor in tensors.items()], dtype)
    stored = load_file(path)
    assert set(stored) == set(tensors)
    for name, tensor in tensors.items():
        assert stored[name].dtype == dtype
        assert torch.equal(stored[name], tensor.to(dtype)), name


def test_float64_is_rounded_once(tmp_path: Path) -> None:
    exact = torch.randn(64, dtype=torch.float64)
    write_safetensors(tmp_path / "x", [streamed("x", exact, 64)], torch.bfloat16)
    assert torch.equal(load_file(tmp_path / "x")["x"], exact.to(torch.bfloat16))


def test_pieces_that_do_not_add_up_are_an_error(tmp_path: Path) -> None:
    short = StreamedTensor("x", (4, 2), lambda: [torch.zeros(3, 2)])
    with pytest.raises(ValueError, match="do not add up"):
        write_safetensors(tmp_path / "x", [short], torch.float32)


def test_shards_hold_what_fits_and_a_larger_tensor_alone(tmp_path: Path) -> None:
    tensors = {name: torch.randn(rows, 5) for name, rows in (("a", 2), ("b", 2), ("c", 9), ("d", 1))}
    paths = write_shards(tmp_path, [streamed(n, t, rows=3) for n, t in tensors.items()], torch.float32, 4 * 5 * 4)
    assert [set(load_file(path)) for path in paths] == [{"c"}, {"a", "b"}, {"d"}]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 14 * 5 * 4
    assert index["weight_map"]["c"] == paths[0].name == "model-00001-of-00003.safetensors"
