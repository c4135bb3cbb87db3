"""Whole training steps without an engine, part by part, of several objectives in turn, so that noise hits all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks.rows import changed, rule_of, step_batches, token_rows
from benchmarks.timing import clock_of, cost, describe, in_child, interleaved, matrix_rate
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.errors import FieldError
from megahead.estimate import peak_flops, run_flops
from megahead.models.documents import Documents, TargetPositions, TokenSubset
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import Pretraining, assemble, fill_, initial_weights
from megahead.optim import build_optimizer
from megahead.terminal import terminal
from megahead.train.run import accelerate_
from megahead.train.step import device_name
from megahead.wording import to_milliseconds

How = Literal["as it is", "compiled", "whole last block", "muon"]
"""As the config says; compiled besides; an encoder's last block computed for every token, not only for targets; with
Muon for the matrices of blocks."""

Plan = tuple[str, How]  # which objective, and how its steps are computed
STEPS = 3  # of each micro-batch whose size is tried; the first is a warm-up
# Settings of an objective that are the same where the other one is timed beside it
OF_BOTH = ("score", "temperature", "learned_temperature", "replaced_tokens", "phrases")


def variant_config(config: RunConfig, objective: str, how: How) -> RunConfig:
    """`config` with another objective, whose vanilla head is its own where it has one, else tied for an encoder; what
    only one of both objectives knows is left out of the other. A share of targets that moves is its mean."""
    if config.engine.precision == "fp16":
        rule = "be fp32 or bf16 for steps without an engine, which scales fp16's loss"
        raise FieldError("engine.precision", rule, got="fp16")
    if config.objective.schedule is not None:
        hint = "--set objective.schedule=null"
        raise FieldError("objective.schedule", "be left out of steps, each of one phase", got="given", hint=hint)
    tree = config.model_dump(mode="json")
    if config.masking is not None and config.masking.final_rate is not None:
        tree["masking"] |= {"rate": config.masking.rate_at(0.5), "final_rate": None, "rate_course": "linear"}
    tree["engine"]["compile"] = how == "compiled" or config.engine.compile
    if how == "muon":
        tree["optimizer"]["name"] = "muon"
    if objective != config.objective.name:
        tied = objective == "vanilla" and (config.objective.tied or config.model.is_encoder())
        kept = {name: tree["objective"][name] for name in OF_BOTH}
        tree["objective"] = kept | {"name": objective, "tied": tied}
    return config_from_dict(tree)


class Weights:
    """A model's, and those of its optimizer, in float32. Where the model's are in bf16, as at ZeRO 1 and higher, passes
    read and write half as many bytes, and nothing is converted each time."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, half: bool) -> None:
        self.optimizer, self.half, self._own = optimizer, half, list(model.parameters())
        full = {own: nn.Parameter(own.detach().clone()) if half else own for own in self._own}
        for group in optimizer.param_groups:
            group["params"] = [full[own] for own in group["params"]]
        self._full = list(full.values())
        if half:
            for own in self._own:
                own.data = own.data.bfloat16()

    def add(self) -> None:
        """Adds a micro-batch's gradients to the step's, in float32, which a backward pass in float32 has done."""
        if not self.half:
            return
        for full, own in zip(self._full, self._own, strict=True):
            if own.grad is not None:
                full.grad = own.grad.float() if full.grad is None else full.grad.add_(own.grad)
                own.grad = None

    def update(self, clipping: float) -> None:
        """Clips the step's gradients, updates the weights, and drops the gradients."""
        nn.utils.clip_grad_norm_(self._full, clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.half:
            torch._foreach_copy_([own.data for own in self._own], [full.data for full in self._full])


@dataclass
class Variant:
    """One objective's model, optimizer and times."""

    config: RunConfig
    objective: str
    device: torch.device
    # Micro-batches; a step takes as many of them as the config accumulates on one rank
    rows: list[np.ndarray[Any, Any]]
    how: How = "as it is"
    times: dict[str, list[float]] = field(default_factory=lambda: {"body": [], "loss": [], "opt": []})
    # Of all threads together in each step: other programs on a CPU change it less than the time that passes
    cpu_seconds: list[float] = field(default_factory=list)
    candidates: list[float] = field(default_factory=list)
    # Largest memory that a step took beside weights and moments: gradients, activations, scores (CUDA only)
    extra_bytes: int = 0

    def __post_init__(self) -> None:
        self.config = variant_config(self.config, self.objective, self.how)
        self.precision = self.config.engine.precision
        self.accumulation = self.config.batch.accumulation_steps(1)
        self.model: Pretraining = assemble(self.config, Group(), self.device)
        fill_(self.model, Group(), initial_weights(self.config))
        if self.config.masking is not None and self.config.masking.is_adaptive():
            self.model.on_errors = lambda *_: None  # what is missed costs a product, whoever notes it
        self.ways, *_ = [accelerate_(each, self.config, self.device) for each in self.model.encoders()]
        self.rule = rule_of(self.config, self.rows)
        optimizer = build_optimizer(self.model, self.config.optimizer)
        self.weights = Weights(self.model, optimizer, half=self.precision == "bf16")
        self.clock = clock_of(self.device)
        self._watch_body()

    def step(self, index: int) -> None:
        """One whole step; the first is a warm-up and is not counted."""
        micro_batches, candidates = self._prepared(index)
        on_gpu, before = self.device.type == "cuda", 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        now, between = self.clock.now, self.clock.seconds
        self.clock.wait()
        of_threads, start = time.process_time(), now()
        passes = [self._forward_backward(micro) for micro in micro_batches]  # begin, end, parts in the body
        self.weights.update(self.config.optimizer.gradient_clipping)
        step_done = now()
        self.clock.wait()
        in_passes = sum(between(begin, end) for begin, end, _ in passes)
        body = sum(between(*part) for *_, encoded in passes for part in encoded)
        parts = body, in_passes - body, between(start, step_done) - in_passes
        if index and on_gpu:
            self.extra_bytes = max(self.extra_bytes, torch.cuda.max_memory_allocated() - before)
        if index:
            for name, seconds in zip(self.times, parts, strict=True):
                self.times[name].append(seconds)
            self.cpu_seconds.append(time.process_time() - of_threads)
            self.candidates.append(candidates)

    def _forward_backward(self, micro: MicroBatch) -> tuple[Any, Any, list[tuple[Any, Any]]]:
        """Of one micro-batch; its gradients are added to those of the step."""
        self._encoded: list[tuple[Any, Any]] = []
        self._loss_done: Any = None
        start = self.clock.now()
        loss = self.model(micro) / self.accumulation
        loss.backward()
        backward_done = self.clock.now()
        self.weights.add()
        return start, backward_done, [*self._encoded, (self._loss_done, backward_done)]

    def name(self) -> str:
        """The objective, and what is unusual about how it is computed."""
        return self.objective if self.how == "as it is" else f"{self.objective}, {self.how}"

    def seconds(self) -> list[float]:
        """Of each whole step."""
        return [sum(parts) for parts in zip(*self.times.values(), strict=True)]

    def flops(self) -> float:
        """Floating-point operations of a step."""
        return run_flops(self.config, round(statistics.mean(self.candidates))).total * self.tokens()

    def tokens(self) -> int:
        """Of a step."""
        return self.config.batch.global_size * self.config.data.sequence_length

    def peak_megabytes(self) -> float | None:
        """Weights, moments and what steps took beside them; None on a CPU, where a child must find out."""
        if self.device.type == "cpu":
            return None
        each = 12 + 2 * self.weights.half
        return (each * sum(parameter.numel() for parameter in self.model.parameters()) + self.extra_bytes) / 1e6

    def row(self, rate: float, peak_megabytes: float | None) -> dict[str, object]:
        """Its line of the table; shares are of the median step."""
        median, operations = statistics.median(self.seconds()), self.flops()
        row: dict[str, object] = {"objective": self.name(), "ms": to_milliseconds(median)}
        row |= {"best": to_milliseconds(min(self.seconds())), "tokens/s": round(self.tokens() / median)}
        row |= {"rows": round(statistics.mean(self.candidates)), "GFLOP": operations / 1e9}
        row["of rate"] = f"{operations / median / rate:.0%}"
        if peak := peak_flops(device_name(self.device), self.precision):
            row["MFU"] = f"{operations / median / peak:.1%}"
        if peak_megabytes is not None:
            row["peak MB"] = round(peak_megabytes)
        return row | {name: f"{statistics.median(times) / median:.0%}" for name, times in self.times.items()}

    def _prepared(self, index: int) -> tuple[list[MicroBatch], float]:
        """A step's micro-batches on the device, as a run's loader would bring them there, and how many candidates they
        have."""
        first = index * self.accumulation
        step = step_batches(self.config, self.rule, self.rows[first : first + self.accumulation], self.device)
        return [micro.to(self.device) for micro in step.micro_batches], step.candidates or self.config.model.vocab_size

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

        def note_loss_done(_: torch.Tensor) -> None:
            self._loss_done = self._loss_done or self.clock.now()

        hidden.register_hook(note_loss_done)
        return hidden


def compare(one: Variant, other: Variant) -> str:
    """Step time of `other` over `one`, pair by pair, on a CPU also that of their threads, beside what their operations
    alone would give."""
    ratios, of_threads = (
        [b / a for a, b in zip(*pair, strict=True)]
        for pair in ((one.seconds(), other.seconds()), (one.cpu_seconds, other.cpu_seconds))
    )
    in_cpu_time = f"; in CPU time {statistics.median(of_threads):.2f}" if one.device.type == "cpu" else ""
    return (
        f"{one.name()} is {statistics.median(ratios):.2f} times as fast as {other.name()} (pairs {min(ratios):.2f} to "
        f"{max(ratios):.2f}){in_cpu_time}; by operations alone {other.flops() / one.flops():.2f}"
    )


def time_steps(
    config: RunConfig, plans: Sequence[Plan], prefix: str | None, steps: int, device: torch.device
) -> list[dict[str, object]]:
    """Times `steps` steps of each plan on the same tokens (of the dataset `prefix`, or the config's), says on what and
    how they compare, and returns a line for each."""
    rows = token_rows(config, prefix, count=(steps + 1) * config.batch.accumulation_steps(1))

    def first_step(plan: Plan) -> None:
        Variant(config, plan[0], device, rows, plan[1]).step(0)

    def megabytes(plan: Plan) -> float | None:
        """Of the first step, in a process of its own; None on a GPU and where blocks are compiled."""
        if device.type == "cuda" or config.engine.compile is True or plan[1] == "compiled":
            return None
        return in_child(lambda: cost(lambda: first_step(plan)))[1] * 2**20 / 1e6

    memory = [megabytes(plan) for plan in plans]
    variants = [Variant(config, objective, device, rows, how) for objective, how in plans]
    interleaved([one.step for one in variants], steps)
    rate, (first, *others) = matrix_rate(device, config.engine.precision), variants
    shape = f"{first.config.batch.micro_size} x {first.config.data.sequence_length} tokens"
    if first.accumulation > 1:
        shape = f"{first.accumulation} micro-batches of {shape}"
    machine = f"{first.precision} on {describe(device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate"
    told = [f"{first.config.name}, {shape}, {machine}", *(f"{name}: {way}" for name, way in variants[-1].ways)]
    terminal().print("\n".join([*told, *(compare(first, other) for other in others)]))
    return [one.row(rate, known or one.peak_megabytes()) for known, one in zip(memory, variants, strict=True)]


def fill(
    config: RunConfig, objectives: Sequence[str], most: int, prefix: str | None, device: torch.device
) -> list[dict[str, object]]:
    """Finds for each objective the largest micro-batch of up to `most` rows that fits; returns a line for each."""
    lines: list[dict[str, object]] = []
    for name in objectives:
        steps_of = cache(lambda rows, name=name: _steps_of(config, rows, name, prefix, device))
        largest = largest_that(lambda rows: steps_of(rows) is not None, config.batch.micro_size, most)  # noqa: B023
        found = steps_of(largest) if largest else {}
        lines.append({"objective": name, "rows of the micro-batch": largest, **(found or {})})
    return lines


def largest_that(fits: Callable[[int], bool], first: int, most: int) -> int:
    """The largest number up to `most` that fits, to an eighth of it; 0 where `first` does not fit."""
    good, rows = 0, min(first, most)
    while rows > good and fits(rows):
        good, rows = rows, min(2 * rows, most)
    if good in (0, rows):
        return good
    bad = rows
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _steps_of(
    config: RunConfig, rows: int, name: str, prefix: str | None, device: torch.device
) -> dict[str, object] | None:
    """What a few steps of such a micro-batch took, the first a warm-up; None where memory does not hold one."""
    config = changed(config, f"batch.micro_size={rows}", f"batch.global_size={rows}")
    try:
        variant = Variant(config, name, device, token_rows(config, prefix, count=STEPS))
        for index in range(STEPS):
            variant.step(index)
        tokens, peak = rows * config.data.sequence_length, variant.peak_megabytes()
        speed = round(tokens / statistics.median(variant.seconds()))
        return {"tokens": tokens, "tokens/s": speed, "peak MB": None if peak is None else round(peak)}
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
