"""Times whole training steps without an engine, by part, of several objectives in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks.rows import build_run_objective, step_batches, token_rows
from benchmarks.timing import Clock, describe_device, measure_cost, measure_matmul_rate, run_in_child
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.errors import FieldError
from megahead.estimate import run_flops
from megahead.models.documents import Documents, TargetPositions, TokenSubset
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import Pretraining, build_parallel_model, initial_weights, load_weights_
from megahead.optim import build_optimizer
from megahead.report.tables import terminal
from megahead.train.run import configure_blocks_
from megahead.train.step import device_name, peak_flops
from megahead.wording import to_milliseconds

Mode = Literal["default", "compiled", "whole last block", "muon"]
"""By the config; with compiled blocks; an encoder's last block computed for every token, not only for targets; with
Muon for the matrices of the blocks."""

VariantSpec = tuple[str, Mode]  # the objective's name, and how its steps are computed
SHARED_SETTINGS = ("score", "temperature", "learned_temperature")  # of headless and vanilla objectives


def variant_config(config: RunConfig, objective: str, mode: Mode) -> RunConfig:
    """Returns `config` with another objective and mode; settings that the objective does not have are dropped.

    A vanilla head is tied if the config or an encoder ties it. A masking rate that changes is fixed at its mean."""
    if config.engine.precision == "fp16":
        rule = "be fp32 or bf16 for steps without an engine, which scales fp16's loss"
        raise FieldError("engine.precision", rule, got="fp16")
    if config.objective.schedule is not None:
        hint = "--set objective.schedule=null"
        raise FieldError("objective.schedule", "be left out of steps, each of one phase", got="given", hint=hint)
    settings = config.model_dump(mode="json")
    if config.masking is not None and config.masking.final_rate is not None:
        settings["masking"] |= {"rate": config.masking.rate_at(0.5), "final_rate": None, "rate_course": "linear"}
    settings["engine"]["compile"] = mode == "compiled" or config.engine.compile
    if mode == "muon":
        settings["optimizer"]["name"] = "muon"
    if objective != config.objective.name:
        tied = objective == "vanilla" and (config.objective.tied or config.model.is_encoder())
        shared_names = [*SHARED_SETTINGS, *filter(None, [config.objective.auxiliary_name()])]
        shared = {name: settings["objective"][name] for name in shared_names}
        settings["objective"] = shared | {"name": objective, "tied": tied}
    return config_from_dict(settings)


class MasterWeights:
    """float32 weights of the optimizer; if `half`, the model's own are bf16 copies of them, as at ZeRO 1 and higher."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, half: bool) -> None:
        self.optimizer, self.half, self._weights = optimizer, half, list(model.parameters())
        master = {weight: nn.Parameter(weight.detach().clone()) if half else weight for weight in self._weights}
        for group in optimizer.param_groups:
            group["params"] = [master[weight] for weight in group["params"]]
        self._masters = list(master.values())
        if half:
            for weight in self._weights:
                weight.data = weight.data.bfloat16()

    def accumulate_gradients(self) -> None:
        """Adds bf16 gradients of a micro-batch to the float32 ones; without `half`, backward has done so."""
        if not self.half:
            return
        for master, weight in zip(self._masters, self._weights, strict=True):
            if weight.grad is not None:
                master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
                weight.grad = None

    def step(self, clipping: float) -> None:
        """Clips the gradients (0: does not), updates the weights, and resets the gradients."""
        nn.utils.clip_grad_norm_(self._masters, clipping or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.half:
            torch._foreach_copy_([weight.data for weight in self._weights], [master.data for master in self._masters])


@dataclass
class Variant:
    """One objective's model, optimizer and times."""

    config: RunConfig
    objective_name: str
    device: torch.device
    # Micro-batches; a step takes as many of them as the config accumulates on one rank
    rows: list[np.ndarray[Any, Any]]
    mode: Mode = "default"
    # Seconds of each step, by part: the backbones, forward and backward; the rest of both passes; the optimizer
    times: dict[str, list[float]] = field(default_factory=lambda: {"body": [], "loss": [], "opt": []})
    # CPU time of all threads in each step; other programs disturb it less than wall time
    cpu_seconds: list[float] = field(default_factory=list)
    candidates: list[float] = field(default_factory=list)
    # Peak memory of a step beside weights and moments: gradients, activations, scores (CUDA only)
    extra_bytes: int = 0

    def __post_init__(self) -> None:
        self.config = variant_config(self.config, self.objective_name, self.mode)
        self.precision = self.config.engine.precision
        self.accumulation = self.config.batch.accumulation_steps(1)
        self.model: Pretraining = build_parallel_model(self.config, Group(), self.device)
        load_weights_(self.model, Group(), initial_weights(self.config))
        if self.config.masking is not None and self.config.masking.is_adaptive():
            # adaptive masking counts at which targets another id scored higher; computing this is timed, counting not
            self.model.on_errors = lambda *_: None
        self.engine_lines = configure_blocks_(self.model, self.config, self.device)
        self.objective = build_run_objective(self.config, self.rows)
        optimizer = build_optimizer(self.model, self.config.optimizer)
        self.weights = MasterWeights(self.model, optimizer, half=self.precision == "bf16")
        self.clock = Clock(self.device)
        self._instrument_encoders()

    def step(self, index: int) -> None:
        """Runs one whole step; the first is a warm-up and is not counted."""
        micro_batches, candidates = self._prepare_step(index)
        on_gpu, before_bytes = self.device.type == "cuda", 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before_bytes = torch.cuda.memory_allocated()
        now, seconds_between = self.clock.now, self.clock.seconds
        self.clock.wait()
        cpu_start, start = time.process_time(), now()
        passes = [self._forward_backward(micro) for micro in micro_batches]  # start, end, spans in encoders
        self.weights.step(self.config.optimizer.gradient_clipping)
        step_done = now()
        self.clock.wait()
        pass_seconds = sum(seconds_between(*span) for *span, _ in passes)
        body_seconds = sum(seconds_between(*part) for *_, encoded in passes for part in encoded)
        parts = body_seconds, pass_seconds - body_seconds, seconds_between(start, step_done) - pass_seconds
        if index and on_gpu:
            self.extra_bytes = max(self.extra_bytes, torch.cuda.max_memory_allocated() - before_bytes)
        if index:
            for name, seconds in zip(self.times, parts, strict=True):
                self.times[name].append(seconds)
            self.cpu_seconds.append(time.process_time() - cpu_start)
            self.candidates.append(candidates)

    def _forward_backward(self, micro: MicroBatch) -> tuple[Any, Any, list[tuple[Any, Any]]]:
        """Runs one micro-batch; returns its start, its end, and the spans of time spent in encoders."""
        self._encoder_spans: list[tuple[Any, Any]] = []
        self._loss_done: Any = None
        start = self.clock.now()
        loss = self.model(micro) / self.accumulation
        loss.backward()
        backward_done = self.clock.now()
        self.weights.accumulate_gradients()
        return start, backward_done, [*self._encoder_spans, (self._loss_done, backward_done)]

    def name(self) -> str:
        """The objective, and the mode unless that is the default."""
        return self.objective_name if self.mode == "default" else f"{self.objective_name}, {self.mode}"

    def seconds(self) -> list[float]:
        """Seconds of each whole step."""
        return [sum(parts) for parts in zip(*self.times.values(), strict=True)]

    def flops(self) -> float:
        """Floating-point operations of a step."""
        return run_flops(self.config, round(statistics.mean(self.candidates))).total * self.tokens()

    def tokens(self) -> int:
        """Tokens that a step reads."""
        return self.config.batch.global_size * self.config.data.sequence_length

    def peak_megabytes(self) -> float | None:
        """Weights, moments, and the peak of a step beside both; None on a CPU, where a child process measures it."""
        if self.device.type == "cpu":
            return None
        weight_bytes = (4 + 2 * self.weights.half) * sum(parameter.numel() for parameter in self.model.parameters())
        moments = (value for state in self.weights.optimizer.state.values() for value in state.values())
        moment_bytes = sum(value.nbytes for value in moments if isinstance(value, torch.Tensor))
        return (weight_bytes + moment_bytes + self.extra_bytes) / 1e6

    def row(self, rate: float, peak_megabytes: float | None) -> dict[str, object]:
        """The variant's row of the table; shares are of the median step."""
        median, flops = statistics.median(self.seconds()), self.flops()
        row: dict[str, object] = {"objective": self.name(), "ms": to_milliseconds(median)}
        row |= {"best": to_milliseconds(min(self.seconds())), "tokens/s": round(self.tokens() / median)}
        row |= {"rows": round(statistics.mean(self.candidates)), "GFLOP": flops / 1e9}
        row["of rate"] = f"{flops / median / rate:.0%}"
        if peak := peak_flops(device_name(self.device), self.precision):
            row["MFU"] = f"{flops / median / peak:.1%}"
        if peak_megabytes is not None:
            row["peak MB"] = round(peak_megabytes)
        return row | {name: f"{statistics.median(times) / median:.0%}" for name, times in self.times.items()}

    def _prepare_step(self, index: int) -> tuple[list[MicroBatch], float]:
        """Returns a step's micro-batches on the device, as by a run's loader, and the number of candidates."""
        first = index * self.accumulation
        step = step_batches(self.config, self.objective, self.rows[first : first + self.accumulation], self.device)
        return [micro.to(self.device) for micro in step.micro_batches], step.candidates or self.config.model.vocab_size

    def _instrument_encoders(self) -> None:
        """Records the spans of the encoders' forward passes, and when the loss's backward pass ends."""
        backbone, *generators = self.model.backbones()
        scored_encoder = generators[0] if generators else backbone
        encode, encode_at = backbone.encode, scored_encoder.encode_at

        def timed_encode_at(
            inputs_BTD: torch.Tensor, documents: Documents, targets: TargetPositions, subsets: Sequence[TokenSubset]
        ) -> torch.Tensor:
            if self.mode == "whole last block":
                targets = replace(targets, max_per_row=None)  # as if nearly all positions were targets
            return self._timed(partial(encode_at, inputs_BTD, documents, targets, subsets))

        scored_encoder.encode_at = timed_encode_at  # type: ignore[method-assign, assignment]
        if generators:  # the model detects what a generator has replaced
            backbone.encode = lambda *inputs: self._timed(partial(encode, *inputs))  # type: ignore[method-assign]

    def _timed(self, encode: Callable[[], torch.Tensor]) -> torch.Tensor:
        start = self.clock.now()
        hidden = encode()
        self._encoder_spans.append((start, self.clock.now()))

        def record_loss_done(_: torch.Tensor) -> None:
            self._loss_done = self._loss_done or self.clock.now()

        hidden.register_hook(record_loss_done)
        return hidden


def describe_ratio(one: Variant, other: Variant) -> str:
    """Describes the ratios `other` / `one` of step times, pair by pair, of CPU times (on a CPU), and of FLOPs."""
    ratios = np.divide(other.seconds(), one.seconds())
    cpu_ratio = np.median(np.divide(other.cpu_seconds, one.cpu_seconds))
    cpu_text = f"; in CPU time {cpu_ratio:.2f}" if one.device.type == "cpu" else ""
    return (
        f"{one.name()} is {np.median(ratios):.2f} times as fast as {other.name()} (pairs {ratios.min():.2f} to "
        f"{ratios.max():.2f}){cpu_text}; by operations alone {other.flops() / one.flops():.2f}"
    )


def time_steps(
    config: RunConfig, specs: Sequence[VariantSpec], prefix: str | None, steps: int, device: torch.device
) -> list[dict[str, object]]:
    """Times `steps` steps of each variant on the same tokens, prints how they compare, and returns a row for each.

    Tokens are those of the dataset `prefix`, else the config's."""
    rows = token_rows(config, prefix, count=(steps + 1) * config.batch.accumulation_steps(1))

    def first_step(spec: VariantSpec) -> None:
        Variant(config, spec[0], device, rows, spec[1]).step(0)

    def peak_megabytes(spec: VariantSpec) -> float | None:
        """Peak memory of the first step, in a child process; None on a GPU and with compiled blocks."""
        if device.type == "cuda" or config.engine.compile is True or spec[1] == "compiled":
            return None
        return run_in_child(lambda: measure_cost(lambda: first_step(spec)))[1] * 2**20 / 1e6  # measured in MiB

    memory = [peak_megabytes(spec) for spec in specs]
    variants = [Variant(config, objective, device, rows, mode) for objective, mode in specs]
    for index, variant in product(range(steps + 1), variants):  # in turn, so that noise affects all alike
        variant.step(index)
    rate, (first, *others) = measure_matmul_rate(device, config.engine.precision), variants
    shape = f"{first.config.batch.micro_size} x {first.config.data.sequence_length} tokens"
    if first.accumulation > 1:
        shape = f"{first.accumulation} micro-batches of {shape}"
    machine = f"{first.precision} on {describe_device(device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate"
    lines = [f"{name}: {value}" for name, value in variants[-1].engine_lines]
    lines += [describe_ratio(first, other) for other in others]
    terminal().print("\n".join([f"{first.config.name}, {shape}, {machine}", *lines]))
    peaks = zip(memory, variants, strict=True)
    return [variant.row(rate, peak or variant.peak_megabytes()) for peak, variant in peaks]
