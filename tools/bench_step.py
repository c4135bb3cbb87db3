"""Times whole training steps, headless against vanilla, in turn: A B A B ..., so that a noisy machine hits both alike.

tools/bench_step.py --preset pythia-14m --micro-batch 8 --sequence-length 512
tools/bench_step.py --preset bert-small --micro-batch 16 --sequence-length 128
tools/bench_step.py --config configs/demo-headless.yaml
tools/bench_step.py --preset pythia-70m --micro-batch 8 --sequence-length 2048 --precision bf16 --compile

A step is forward, backward, clipping and a fused AdamW update of one micro-batch, without an engine. Tokens come from
the config's dataset (or --data PREFIX), else from Zipf's law, which has about as many different tokens as real text.
An encoder masks 15 % of its tokens; its vanilla head is BERT's own, tied.

ms: median step; best: fastest; rows: candidates scored; of rate: share of the device's measured matrix rate; body,
loss, opt: shares of the step in the backbone, in the look-up and the loss (both forward and backward), and in clipping
and the optimizer. The device is waited for between them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from megahead.config import NAMED_SIZES, RunConfig, config_from_dict, load_config
from megahead.data import BatchReader, IndexedDataset, SampleRows, held_out_masker, training_samples
from megahead.errors import run_command
from megahead.estimate import training_flops
from megahead.objectives import Objective, build_objective
from megahead.optim import build_adamw
from megahead.pretraining import MicroBatch, Pretraining, build
from megahead.report import to_rich
from megahead.train.acceleration import accelerate_

PYTHIA_VOCABULARY = 50277
BERT_VOCABULARY = {"distilbert-multilingual": 119547}
BERT_TOKENS = {"mask_token": 103, "cls_token": 101, "sep_token": 102}


def main() -> None:
    arguments = _parser().parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    config = _config(arguments)
    rows = token_rows(config, arguments.data, count=arguments.steps + 1)
    contenders = [
        Contender(config, name, device, arguments.precision, rows, compiled)
        for compiled in ([False, True] if arguments.compile else [False])
        for name in arguments.objectives.split(",")
    ]
    for index in range(arguments.steps + 1):
        for contender in contenders:
            contender.step(index)
    rate = matrix_rate(device, arguments.precision)
    console = Console(highlight=False)
    shape = f"{config.batch.micro_size} x {config.data.sequence_length} tokens"
    console.print(
        f"{config.name}, {shape}, {arguments.precision} on {describe(device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate"
    )
    for name, way in contenders[-1].ways:
        console.print(f"{name}: {way}")
    console.print(to_rich([contender.row(rate) for contender in contenders]))
    for other in contenders[1:]:
        console.print(compare(contenders[0], other))


@dataclass
class Contender:
    """One objective's model, optimizer and times."""

    config: RunConfig
    objective: str
    device: torch.device
    precision: str
    rows: list[np.ndarray[Any, Any]]
    compiled: bool = False
    times: dict[str, list[float]] = field(default_factory=lambda: {"body": [], "loss": [], "opt": []})
    candidates: list[int] = field(default_factory=list)
    extra_bytes: int = 0
    """Largest memory a step took beside weights and moments (CUDA only): gradients, activations, scores."""

    def __post_init__(self) -> None:
        tree = self.config.model_dump(mode="json")
        tree["engine"] |= {"precision": self.precision, "compile": self.compiled}
        tree["objective"]["name"] = self.objective
        tree["objective"]["tied"] = self.config.model.is_encoder() and self.objective == "vanilla"
        self.config = config_from_dict(tree)
        self.model: Pretraining = build(self.config, self.device)
        self.ways = accelerate_(self.model.backbone, self.config, self.device)
        self.rule = build_objective(self.config.objective, self.config.model.vocab_size)
        self.optimizer = build_adamw(self.model, self.config.optimizer)
        self._watch_body()

    def step(self, index: int) -> None:
        """One whole step; the first is a warm-up and is not counted."""
        micro, candidates = self._prepared(self.rows[index])
        before = self._allocated()
        start = self._now()
        self._loss(micro).backward()
        backward_done = self._now()
        self._update()
        step_done = self._now()
        body = self._encoded[1] - self._encoded[0] + backward_done - self._loss_done
        parts = (body, backward_done - start - body, step_done - backward_done)
        if index and self.device.type == "cuda":
            self.extra_bytes = max(self.extra_bytes, torch.cuda.max_memory_allocated() - before)
        if index:
            for name, seconds in zip(self.times, parts, strict=True):
                self.times[name].append(seconds)
            self.candidates.append(candidates)

    def name(self) -> str:
        """The objective, and what is unusual about how it is computed."""
        return f"{self.objective}, compiled" if self.compiled else self.objective

    def seconds(self) -> list[float]:
        """Of each whole step."""
        return [sum(parts) for parts in zip(*self.times.values(), strict=True)]

    def flops(self) -> float:
        """Floating-point operations of a step."""
        per_token = training_flops(
            self.config.model,
            self.config.data.sequence_length,
            round(statistics.mean(self.candidates)),
            targets=self.config.targets_per_row(),
        )
        return per_token.total * self.config.batch.micro_size * self.config.data.sequence_length

    def row(self, rate: float) -> dict[str, object]:
        """Its line of the table; shares are of the median step."""
        median = statistics.median(self.seconds())
        tokens = self.config.batch.micro_size * self.config.data.sequence_length
        row: dict[str, object] = {
            "objective": self.name(),
            "ms": round(median * 1e3),
            "best": round(min(self.seconds()) * 1e3),
            "tokens/s": round(tokens / median),
            "rows": round(statistics.mean(self.candidates)),
            "GFLOP": self.flops() / 1e9,
            "of rate": f"{self.flops() / median / rate:.0%}",
        }
        if self.device.type == "cuda":
            weights_and_moments = 12 * sum(parameter.numel() for parameter in self.model.parameters())
            row["peak MB"] = round((weights_and_moments + self.extra_bytes) / 1e6)
        for name, times in self.times.items():
            row[name] = f"{statistics.median(times) / median:.0%}"
        return row

    def _prepared(self, rows: np.ndarray[Any, Any]) -> tuple[MicroBatch, int]:
        """A micro-batch on the device, as a run's feed would bring it there, and how many candidates it has."""
        micro = micro_batch(self.config, self.rule, rows)
        (candidates,) = micro.candidates
        count = self.config.model.vocab_size if candidates.ids_U is None else candidates.ids_U.numel()
        return micro.staged(self.device).to(self.device), count

    def _loss(self, micro: MicroBatch) -> torch.Tensor:
        half = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext():
            return self.model(micro)

    def _allocated(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _watch_body(self) -> None:
        """Notes when the backbone's forward pass begins and ends, and when its backward pass begins."""
        encode_at = self.model.backbone.encode_at

        def watched(*arguments: Any) -> torch.Tensor:
            begin = self._now()
            outputs_ND = encode_at(*arguments)
            self._encoded = begin, self._now()
            outputs_ND.register_hook(self._note_loss_done)
            return outputs_ND

        self.model.backbone.encode_at = watched  # type: ignore[method-assign]

    def _note_loss_done(self, _: torch.Tensor) -> None:
        self._loss_done = self._now()

    def _now(self) -> float:
        """Seconds, once the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def micro_batch(config: RunConfig, rule: Objective, rows: np.ndarray[Any, Any]) -> MicroBatch:
    """`rows` with their candidates, as the only micro-batch of its step."""
    batch = BatchReader(_Given(rows), config.data, held_out_masker(config)).read(range(len(rows)))
    candidates = rule.pool(batch.target_ids_N).candidates(batch.target_ids_N)
    return MicroBatch(batch, (candidates,), 1 / batch.target_ids_N.numel())


@dataclass(frozen=True)
class _Given(SampleRows):
    """Rows at hand, by number."""

    given: np.ndarray[Any, Any]

    def rows(self, sample_indices: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self.given[np.asarray(sample_indices)]


def compare(one: Contender, other: Contender) -> str:
    """Step time of `other` over `one`, pair by pair, beside what their operations alone would give."""
    ratios = [b / a for a, b in zip(one.seconds(), other.seconds(), strict=True)]
    return (
        f"{one.name()} is {statistics.median(ratios):.2f} times as fast as {other.name()} "
        f"(pairs {min(ratios):.2f} to {max(ratios):.2f}); by operations alone {other.flops() / one.flops():.2f}"
    )


def token_rows(config: RunConfig, prefix: str | None, count: int) -> list[np.ndarray[Any, Any]]:
    """`count` micro-batches of rows, int64 [B, T+1]; [B, T-2] for an encoder, whose rows are framed later."""
    size, length = config.batch.micro_size, config.sample_length()
    prefix = prefix or config.data.parts()[0].prefix
    if prefix:
        data = config.data.model_copy(update={"train": prefix})
        samples = training_samples(data, [IndexedDataset(prefix)], config.seed, length)
        return [samples.rows(range(k * size, (k + 1) * size)) for k in range(count)]
    weights = 1 / (np.arange(config.model.vocab_size) + 2.7)  # Zipf-Mandelbrot
    weights[config.data.end_token] = 0.0  # rows are one document each
    generator = np.random.default_rng(config.seed)
    draw = generator.choice(config.model.vocab_size, (count, size, length + 1), p=weights / weights.sum())
    return list(draw)


def matrix_rate(device: torch.device, precision: str, size: int | None = None) -> float:
    """Operations a second of a square product, the best of five: what the device can reach."""
    size = size or (8192 if device.type == "cuda" else 2048)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def describe(device: torch.device) -> str:
    """The device's name, or how many threads compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' if threads > 1 else ''}"


def _config(arguments: argparse.Namespace) -> RunConfig:
    if arguments.config:
        return load_config(arguments.config, arguments.set)
    size, length = arguments.preset, arguments.sequence_length
    encoder = NAMED_SIZES[size].get("family") == "bert"
    vocabulary = BERT_VOCABULARY.get(size, 30522) if encoder else PYTHIA_VOCABULARY
    return config_from_dict(
        {
            "name": size,
            "model": {"size": size, "vocab_size": vocabulary, "max_positions": max(512 if encoder else 2048, length)},
            "masking": BERT_TOKENS if encoder else None,
            "data": {"train": "", "sequence_length": length},
            "batch": {"global_size": arguments.micro_batch, "micro_size": arguments.micro_batch},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 1},
        }
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time whole training steps, headless against vanilla.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", choices=NAMED_SIZES, help="a named size, with Pythia's or BERT's vocabulary")
    what.add_argument("--config", help="a run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting of --config")
    parser.add_argument("--data", metavar="PREFIX", help="indexed dataset to take tokens from")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of --preset (default: 8)")
    parser.add_argument("--sequence-length", type=int, default=512, help="targets a row of --preset (default: 512)")
    parser.add_argument("--objectives", default="headless,vanilla", help="what to compare (default: headless,vanilla)")
    parser.add_argument("--compile", action="store_true", help="time each with compiled blocks, too")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="CPU threads")
    return parser


if __name__ == "__main__":
    run_command(main)
