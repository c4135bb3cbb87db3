"""One objective's model and optimizer, stepped and timed part by part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.clocks import clock_of
from benchmarks.plans import How, contending
from benchmarks.rules import rule_of
from benchmarks.tokens import step_batches
from benchmarks.weights import HalfWeights, weights_of
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.estimate import peak_flops, run_flops
from megahead.models.documents import Documents, TargetPositions, TokenSubset
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import Pretraining, assemble, fill_, first_weights
from megahead.optim import build_optimizer
from megahead.train.run import accelerate_
from megahead.train.step import device_name
from megahead.wording import milliseconds


@dataclass
class Contender:
    """One objective's model, optimizer and times."""

    config: RunConfig
    objective: str
    device: torch.device
    rows: list[np.ndarray[Any, Any]]
    """Micro-batches; a step takes as many of them as the config accumulates on one rank."""

    how: How = "as it is"
    times: dict[str, list[float]] = field(default_factory=lambda: {"body": [], "loss": [], "opt": []})
    cpu_seconds: list[float] = field(default_factory=list)
    """Of all threads together in each step: other programs on a CPU change it less than the time that passes."""

    candidates: list[float] = field(default_factory=list)
    extra_bytes: int = 0
    """Largest memory that a step took beside weights and moments: gradients, activations, scores (CUDA only)."""

    def __post_init__(self) -> None:
        self.config = contending(self.config, self.objective, self.how)
        self.precision = self.config.engine.precision
        self.accumulation = self.config.batch.accumulation_steps(1)
        self.model: Pretraining = assemble(self.config, Group(), self.device)
        fill_(self.model, Group(), first_weights(self.config))
        if self.config.masking is not None and self.config.masking.adapts():
            self.model.note_misses = lambda *_: None  # what is missed costs a product, whoever notes it
        self.ways, *_ = [accelerate_(each, self.config, self.device) for each in self.model.encoders()]
        self.rule = rule_of(self.config, self.rows)
        optimizer = build_optimizer(self.model, self.config.optimizer)
        self.weights = weights_of(self.model, optimizer, self.precision)
        self.clock = clock_of(self.device)
        self._watch_body()

    def step(self, index: int) -> None:
        """One whole step; the first is a warm-up and is not counted."""
        micro_batches, candidates = self._prepared(index)
        before = self._allocated()
        now, between = self.clock.now, self.clock.seconds
        self.clock.wait()
        of_threads, start = time.process_time(), now()
        passes = [self._forward_backward(micro) for micro in micro_batches]
        self.weights.update(self.config.optimizer.gradient_clipping)
        step_done = now()
        self.clock.wait()
        in_passes = sum(between(one.start, one.end) for one in passes)
        body = sum(between(*part) for one in passes for part in one.body)
        parts = body, in_passes - body, between(start, step_done) - in_passes
        if index and self.device.type == "cuda":
            self.extra_bytes = max(self.extra_bytes, torch.cuda.max_memory_allocated() - before)
        if index:
            for name, seconds in zip(self.times, parts, strict=True):
                self.times[name].append(seconds)
            self.cpu_seconds.append(time.process_time() - of_threads)
            self.candidates.append(candidates)

    def _forward_backward(self, micro: MicroBatch) -> _Pass:
        """Of one micro-batch; its gradients are added to those of the step."""
        self._encoded: list[tuple[Any, Any]] = []
        self._loss_done: Any = None
        start = self.clock.now()
        loss = self.model(micro) / self.accumulation
        loss.backward()
        backward_done = self.clock.now()
        self.weights.add()
        return _Pass(start, backward_done, [*self._encoded, (self._loss_done, backward_done)])

    def name(self) -> str:
        """The objective, and what is unusual about how it is computed."""
        return self.objective if self.how == "as it is" else f"{self.objective}, {self.how}"

    def seconds(self) -> list[float]:
        """Of each whole step."""
        return [sum(parts) for parts in zip(*self.times.values(), strict=True)]

    def flops(self) -> float:
        """Floating-point operations of a step."""
        per_token = run_flops(self.config, round(statistics.mean(self.candidates)))
        return per_token.total * self.tokens()

    def tokens(self) -> int:
        """Of a step."""
        return self.config.batch.global_size * self.config.data.sequence_length

    def peak_megabytes(self) -> float | None:
        """Weights, moments and what steps took beside them; None on a CPU, where a child must find out."""
        if self.device.type == "cpu":
            return None
        each = 12 + 2 * isinstance(self.weights, HalfWeights)
        return (each * sum(parameter.numel() for parameter in self.model.parameters()) + self.extra_bytes) / 1e6

    def row(self, rate: float, peak_megabytes: float | None) -> dict[str, object]:
        """Its line of the table; shares are of the median step."""
        median = statistics.median(self.seconds())
        row: dict[str, object] = {
            "objective": self.name(),
            "ms": milliseconds(median),
            "best": milliseconds(min(self.seconds())),
            "tokens/s": round(self.tokens() / median),
            "rows": round(statistics.mean(self.candidates)),
            "GFLOP": self.flops() / 1e9,
            "of rate": f"{self.flops() / median / rate:.0%}",
        }
        if peak := peak_flops(device_name(self.device), self.precision):
            row["MFU"] = f"{self.flops() / median / peak:.1%}"
        if peak_megabytes is not None:
            row["peak MB"] = round(peak_megabytes)
        for name, times in self.times.items():
            row[name] = f"{statistics.median(times) / median:.0%}"
        return row

    def _prepared(self, index: int) -> tuple[list[MicroBatch], float]:
        """A step's micro-batches on the device, as a run's feed would bring them there, and how many candidates they
        have."""
        first = index * self.accumulation
        step = step_batches(self.config, self.rule, self.rows[first : first + self.accumulation], self.device)
        return [micro.to(self.device) for micro in step.micro_batches], step.candidates or self.config.model.vocab_size

    def _allocated(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _watch_body(self) -> None:
        """Notes how long forward passes of the body take, and when the first of its backward passes begins."""
        backbone, *generators = self.model.encoders()
        learner = generators[0] if generators else backbone
        encode, encode_at = backbone.encode, learner.encode_at

        def watched_at(
            rows_BTD: torch.Tensor, documents: Documents, targets: TargetPositions, shorter: Sequence[TokenSubset]
        ) -> torch.Tensor:
            if self.how == "whole last block":
                targets = replace(targets, max_per_row=None)
            return self._watched(lambda: encode_at(rows_BTD, documents, targets, shorter))

        learner.encode_at = watched_at  # type: ignore[method-assign, assignment]
        if generators:  # the model judges what one has written
            backbone.encode = lambda rows_BTD, documents: self._watched(lambda: encode(rows_BTD, documents))  # type: ignore[method-assign]

    def _watched(self, encode: Callable[[], torch.Tensor]) -> torch.Tensor:
        begin = self.clock.now()
        hidden = encode()
        self._encoded.append((begin, self.clock.now()))
        hidden.register_hook(self._note_loss_done)
        return hidden

    def _note_loss_done(self, _: torch.Tensor) -> None:
        self._loss_done = self._loss_done or self.clock.now()


class _Pass(NamedTuple):
    """When a forward and backward pass and its parts in the body began and ended."""

    start: Any
    end: Any
    body: list[tuple[Any, Any]]


def compare(one: Contender, other: Contender) -> str:
    """Step time of `other` over `one`, pair by pair, on a CPU also that of their threads, beside what their operations
    alone would give."""
    ratios, of_threads = _ratios(one.seconds(), other.seconds()), _ratios(one.cpu_seconds, other.cpu_seconds)
    in_cpu_time = f"; in CPU time {statistics.median(of_threads):.2f}" if one.device.type == "cpu" else ""
    return (
        f"{one.name()} is {statistics.median(ratios):.2f} times as fast as {other.name()} (pairs {min(ratios):.2f} to "
        f"{max(ratios):.2f}){in_cpu_time}; by operations alone {other.flops() / one.flops():.2f}"
    )


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [b / a for a, b in zip(one, other, strict=True)]
