"""The benchmark of the loss compares what is equal, and sees memory that is used."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_loss
import numpy as np
import pytest
import torch
from bench_loss import read_targets
from torch import Tensor
from torch.nn import functional as F

from benchmarks import losses
from benchmarks.losses import Contestant, LossInputs
from benchmarks.timing import run_in_child
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import DataError
from megahead.objectives.micro_batch import CANDIDATE_MULTIPLE


def random_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(30, 6, generator=generator, requires_grad=True)
    table = torch.randn(40, 6, generator=generator, requires_grad=True)
    return outputs, torch.randint(40, (30,), generator=generator), table


def test_forms_that_are_compared_compute_the_same() -> None:
    outputs, targets, table = random_inputs()
    for fast, slow in (("ours", "paper"), ("softmax, ours", "softmax, plain")):
        values = [losses.LOSSES[name](outputs, targets, table) for name in (fast, slow)]
        torch.testing.assert_close(*values)
        gradients = [torch.autograd.grad(loss, [outputs, table]) for loss in values]
        torch.testing.assert_close(*gradients)


def test_a_measurement_sees_the_memory_a_form_takes() -> None:
    def wasteful(outputs: Tensor, targets: Tensor, table: Tensor) -> Tensor:
        waste = torch.ones(2**24 if len(targets) == 30 else 1)  # 64 MiB
        return (outputs.sum() + table.sum()) * waste[0]

    outputs, targets, table = random_inputs()
    seconds, mebibytes = run_in_child(lambda: losses.measure_on_cpu(wasteful, outputs, targets, table))
    assert seconds > 0
    assert 60 < mebibytes < 100


def test_as_many_targets_are_drawn_as_are_asked_for(tmp_path: Path) -> None:
    assert len(read_targets(None, min_targets=70_000)) == 70_000
    assert np.array_equal(read_targets(None, 70_000)[: 2**15], read_targets(None, 1_000))
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=60) as writer:
        writer.add_document(np.arange(5_000) % 60)
    assert len(read_targets(str(tmp_path / "text"), min_targets=4_000)) == 4_608  # whole rows
    with pytest.raises(
        DataError, match=r"text` must hold 4,700 tokens in rows of 512, as --sizes asks, but holds 4,608"
    ):
        read_targets(str(tmp_path / "text"), min_targets=4_700)


def test_the_command_has_targets_for_its_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(losses, "compare_losses", lambda targets, arguments: sizes.append(len(targets)))
    monkeypatch.setattr(sys, "argv", ["bench_loss.py", "--sizes", "65536,1024"])
    bench_loss.main()
    assert sizes == [65536]


def cross_entropy(outputs: Tensor, rows: Tensor, own: Tensor, bias: Tensor | None = None) -> Tensor:
    """What other people's kernels compute."""
    scores = outputs @ rows.T
    return F.cross_entropy(scores if bias is None else scores + bias, own)


def unbiased(outputs: Tensor, rows: Tensor, own: Tensor) -> Tensor:
    """What takes no bias."""
    assert outputs.shape[1] == rows.shape[1]
    return cross_entropy(outputs, rows, own)


def breaking(outputs: Tensor, rows: Tensor, own: Tensor, bias: Tensor | None = None) -> Tensor:
    raise RuntimeError(f"not for\n  {outputs.shape[1]} features")


THEIRS = {"theirs": "cross_entropy", "plainer": "unbiased", "broken": "breaking"}


def test_other_peoples_kernels_are_asked_for_the_same(monkeypatch) -> None:
    others = {name: (__name__, function) for name, function in THEIRS.items()}
    monkeypatch.setattr(losses, "THIRD_PARTY_KERNELS", others | {"gone": ("not_installed", "f")})
    monkeypatch.setitem(
        sys.modules, __name__, sys.modules.get(__name__) or SimpleNamespace(cross_entropy=cross_entropy)
    )
    inputs = LossInputs.random(random_inputs()[1], 40, 6, torch.float32)
    kernels, absent = losses.find_kernels(inputs)
    contestants = losses.build_gpu_contestants(inputs, kernels)
    assert [contestant.name for contestant in contestants] == [
        "ours", "paper", "theirs", "plainer", "softmax, ours", "softmax, plain", "softmax, theirs", "softmax, plainer"
    ]  # fmt: skip
    begins_with = {contestant.name: len(contestant.inputs.table) for contestant in contestants}
    assert begins_with["ours"] == CANDIDATE_MULTIPLE  # as the loader pads them
    assert begins_with["paper"] == begins_with["theirs"] == len(inputs.targets.unique())
    assert begins_with["softmax, ours"] == begins_with["softmax, theirs"] == 40
    assert absent == ["without broken: not for 6 features", "without gone: No module named 'not_installed'"]
    for line in losses.error_rows(contestants):
        assert 0 <= max(float(line[part]) for part in ("loss", "gradient of outputs", "of the table")) < 1e-6, line


def arguments(*given: str) -> argparse.Namespace:
    return bench_loss._parser().parse_args([*given, "--rounds", "2", "--plain-up-to", "0"])


def test_a_form_that_memory_does_not_hold_is_told_and_the_others_are_measured(tmp_path: Path, monkeypatch) -> None:
    """As on a GPU, where it is an error that can be caught."""
    tried: list[str] = []

    def paper_loss(outputs: Tensor, targets: Tensor, table: Tensor) -> Tensor:
        tried.append("paper")
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(losses, "LOSSES", {**losses.LOSSES, "paper": paper_loss})
    monkeypatch.setattr(losses, "error_rows", lambda contestants: iter([{"form": "ours", "loss": "1e-8"}]))
    cost = losses.PassCost(0.5, 2.0)
    monkeypatch.setattr(losses, "measure_pass", lambda loss, inputs: inputs.loss_and_gradients(loss) and cost)
    monkeypatch.setattr(losses, "measure_matmul_rate", lambda device, precision: 1e9)
    output = tmp_path / "loss.json"
    losses.compare_losses(random_inputs()[1], arguments("--sizes", "20,30", "--hidden", "6", "--output", str(output)))
    assert tried == ["paper"] * 2  # once for each size
    lines = json.loads(output.read_text())
    assert [(line["N"], line["form"], line["seconds"]) for line in lines[:3]] == [
        (20, "ours", 0.5), (20, "paper", None), (20, "softmax, ours", 0.5)
    ]  # fmt: skip
    assert lines[-1] == {"form": "ours", "loss": "1e-8"}
    assert len(lines) == 7


def test_errors_see_what_is_wrong() -> None:
    def twice(outputs: Tensor, targets: Tensor, table: Tensor) -> Tensor:
        return 2 * losses.paper_loss(outputs, targets, table)

    (line,) = losses.error_rows(
        [Contestant("twice", twice, LossInputs.random(random_inputs()[1], 40, 6, torch.float32))]
    )
    assert [float(line[part]) for part in ("loss", "gradient of outputs", "of the table")] == [1.0, 1.0, 1.0]


class Event:
    """A CUDA device's clock, which goes on by a second with each pass."""

    happened: list[str]

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        self.place = self.happened.count("pass")
        self.happened.append("event")

    def synchronize(self) -> None:
        self.happened.append("wait")

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.place - self.place)


def test_on_a_gpu_many_passes_are_timed_and_nothing_waits_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    monkeypatch.setattr(Event, "happened", happened, raising=False)
    for name, value in {
        "Event": Event,
        "synchronize": lambda: happened.append("wait"),
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 2**20,
        "max_memory_allocated": lambda: 3 * 2**20,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def loss_function(outputs: Tensor, targets: Tensor, table: Tensor) -> Tensor:
        happened.append("pass")
        return outputs.sum() + table.sum()

    taken = losses.measure_on_gpu(loss_function, LossInputs(*random_inputs()))
    assert (taken.seconds, taken.mebibytes) == (1.0, 2.0)
    assert taken.host_seconds is not None
    first = happened.index("event")
    assert happened[first:] == ["event", *["pass"] * losses.PASSES, "event", "wait"]


def test_an_error_in_a_child_is_no_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="a measurement failed with the error above"):
        run_in_child(lambda: 1 / 0)
