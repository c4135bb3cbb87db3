"""Times whole training steps, headless against vanilla, in turn: A B A B ..., so that a noisy machine hits both alike.

tools/bench_step.py --preset pythia-14m --micro-batch 8 --sequence-length 512
tools/bench_step.py --preset bert-small --micro-batch 16 --sequence-length 128
tools/bench_step.py --config configs/demo-headless.yaml
tools/bench_step.py --preset pythia-70m --micro-batch 8 --sequence-length 2048 --precision bf16 --compile

A step is forward, backward, clipping and a fused AdamW update of one micro-batch, without an engine. Tokens come from
the config's dataset (or --data PREFIX), else from Zipf's law, which has about as many different tokens as real text.
An encoder masks 15 % of its tokens; its vanilla head is BERT's own, tied.

ms: median step; best: fastest; rows: candidates scored; of rate: share of the device's measured matrix rate; peak MB:
weights, gradients, moments and activations (on a CPU of one step in a process of its own, not when compiled); body,
loss, opt: shares of the step in the backbone, in the look-up and the loss (both forward and backward), and in clipping
and the optimizer. The device is waited for between them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.contender import Contender, How, compare
from benchmarks.device import describe, matrix_rate
from benchmarks.memory import cost, in_child
from benchmarks.tokens import token_rows
from megahead.config import NAMED_SIZES, RunConfig, config_from_dict, load_config
from megahead.errors import run_command
from megahead.report import to_rich
from megahead.report.tables import to_json

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
    hows: list[How] = ["as it is"]
    hows += ["compiled"] if arguments.compile else []
    hows += ["whole last block"] if arguments.whole else []
    plans = [(name, how) for how in hows for name in arguments.objectives.split(",")]

    def contender(name: str, how: How) -> Contender:
        return Contender(config, name, device, arguments.precision, rows, how)

    memory = [
        None if device.type == "cuda" or plan[1] == "compiled" else peak_of_a_step(partial(contender, *plan))
        for plan in plans
    ]
    contenders = [contender(*plan) for plan in plans]
    for index in range(arguments.steps + 1):
        for one in contenders:
            one.step(index)
    rate = matrix_rate(device, arguments.precision)
    peaks = [measured or one.peak_megabytes() for measured, one in zip(memory, contenders, strict=True)]
    lines = [one.row(rate, peak) for one, peak in zip(contenders, peaks, strict=True)]
    tell(contenders, lines, rate)
    if arguments.output:
        arguments.output.write_text(to_json(lines), encoding="utf-8")


def peak_of_a_step(build: Callable[[], Contender]) -> float:
    """MB that a contender and its first step take on a CPU, in a process of its own."""
    _, mebibytes = in_child(lambda: cost(lambda: _stepped(build())))
    return mebibytes * 2**20 / 1e6


def _stepped(contender: Contender) -> Contender:
    contender.step(0)
    return contender


def tell(contenders: Sequence[Contender], lines: Sequence[dict[str, object]], rate: float) -> None:
    """What was timed, the table, and the ratios."""
    first, console = contenders[0], Console(highlight=False)
    shape = f"{first.config.batch.micro_size} x {first.config.data.sequence_length} tokens"
    machine = f"{first.precision} on {describe(first.device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate"
    console.print(f"{first.config.name}, {shape}, {machine}")
    for name, way in contenders[-1].ways:
        console.print(f"{name}: {way}")
    console.print(to_rich(lines))
    for other in contenders[1:]:
        console.print(compare(first, other))


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
    parser.add_argument("--whole", action="store_true", help="time an encoder's last block of all tokens, too")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the table's lines there")
    return parser


if __name__ == "__main__":
    run_command(main)
