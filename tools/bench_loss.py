"""Times the loss alone, forward and backward, and its peak memory: the paper's form, ours, and the full softmax.

tools/bench_loss.py --data docs.jsonl.zst --tokenizer 20B_tokenizer.json
tools/bench_loss.py --data PREFIX --sizes 1024,4096 --hidden 512
tools/bench_loss.py --device cuda --precision bf16 --sizes 4096,16384,65536

All begin with outputs [N, D], targets [N] and the table [V, D], and end with the gradients of outputs and table. They
are measured in turn (A B C D A B C D ...), so that a noisy machine hits all alike; on a CPU each time in a forked
process of its own, so that no memory is shared. On CUDA Liger's fused linear cross-entropy and Apple's
cut-cross-entropy take part where they are installed. Errors against float64 follow at the end. Without --data, targets
come from Zipf's law.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import torch
import zstandard
from rich.console import Console
from torch import Tensor

from benchmarks.device import describe, matrix_rate
from benchmarks.loss_forms import FORMS, Form, Problem, errors, with_others
from benchmarks.memory import Cost, cost, in_child
from megahead.corpus import IndexedDataset, load_tokenizer
from megahead.errors import DataError, run_command
from megahead.report import to_rich

VOCABULARY = 50304
TOKENS = 1_000_000
ROW = 512
ERROR_SIZE = 1024


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    forms, absent = with_others() if device.type == "cuda" else (FORMS, [])
    targets = torch.from_numpy(read_tokens(arguments.data, arguments.tokenizer)).to(device)
    rate = device_rate(device, arguments.precision)
    console = Console(highlight=False, width=160)
    console.print(f"{arguments.precision} on {describe(device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate")
    source = arguments.data or "Zipf's law"
    console.print("\n".join([f"vocabulary {VOCABULARY:,}, targets from {source}", *absent]))
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    for hidden in arguments.hidden:
        console.print(f"\nhidden {hidden}: ours forward + backward; time and memory of others as multiples of ours")
        problems = (Problem.drawn(targets[:size], VOCABULARY, hidden, dtype) for size in arguments.sizes)
        console.print(to_rich([row(problem, forms, rate, arguments) for problem in problems]))
    problem = Problem.drawn(targets[:ERROR_SIZE], VOCABULARY, arguments.hidden[0], dtype)
    console.print(f"\nrelative errors against float64, N = {ERROR_SIZE:,}, hidden {arguments.hidden[0]}")
    console.print(to_rich(list(errors(forms, problem))))


def row(problem: Problem, forms: dict[str, Form], rate: float, arguments: argparse.Namespace) -> dict[str, object]:
    """One N: our median time, its share of the matrix rate by three products of N x U x D, our memory; and every other
    form's ratio to ours."""
    size, hidden = problem.outputs.shape
    forms = {name: form for name, form in forms.items() if name != "softmax, plain" or size <= arguments.plain_up_to}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for _ in range(arguments.rounds):
        for name, form in forms.items():
            measured[name].append(observe(form, problem))
    candidates = len(problem.targets.unique())
    ours = [statistics.median(column) for column in zip(*measured["ours"], strict=True)]
    line: dict[str, object] = {"N": size, "U": candidates, "s": f"{ours[0]:.3g}"}
    line |= {"of rate": f"{6 * size * candidates * hidden / ours[0] / rate:.0%}", "MiB": f"{ours[1]:,.0f}"}
    for name, results in measured.items():
        if name != "ours":
            seconds, mebibytes = (statistics.median(column) for column in zip(*results, strict=True))
            line[name] = f"{seconds / ours[0]:.1f}x {mebibytes / ours[1]:.1f}x"
    return line


def observe(form: Form, problem: Problem) -> Cost:
    """(seconds, peak MiB above what was there before) of one forward and backward pass, wherever the problem lies."""
    if problem.outputs.is_cuda:
        return measure_on_gpu(form, problem)
    return in_child(lambda: measure(form, *problem))


def measure_on_gpu(form: Form, problem: Problem) -> Cost:
    """After a pass that is not measured, in which kernels are compiled and tuned."""
    problem.solved(form)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    problem.solved(form)
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 2**20


def device_rate(device: torch.device, precision: str) -> float:
    """What `matrix_rate` finds; on a CPU in a child, as threads that have computed do not survive a fork."""
    if device.type == "cuda":
        return matrix_rate(device, precision)
    return in_child(lambda: matrix_rate(device, precision))


def measure(form: Form, outputs: Tensor, targets: Tensor, table: Tensor) -> Cost:
    """One pass on the CPU, in a process that does nothing else."""
    small = outputs[:64].detach().requires_grad_()
    torch.autograd.grad(form(small, targets[:64], table[:, : small.shape[1]]), [small])  # threads and libraries awake
    return cost(lambda: torch.autograd.grad(form(outputs, targets, table), [outputs, table]))


def read_tokens(source: str | None, tokenizer: str | None) -> np.ndarray:
    """int64 targets, rows of ROW tokens spread over the first TOKENS of the text as a shuffled batch has them."""
    generator = np.random.default_rng(0)
    if source is None:
        weights = 1 / (np.arange(VOCABULARY) + 2.7)  # Zipf-Mandelbrot
        return generator.choice(VOCABULARY, 2**15, p=weights / weights.sum())
    if tokenizer is None:
        dataset = IndexedDataset(source)
        tokens = dataset.read(0, min(TOKENS, dataset.num_tokens)).astype(np.int64)
    else:
        tokens = np.fromiter(_encoded(Path(source), tokenizer), np.int64, TOKENS)
    rows = tokens[: len(tokens) // ROW * ROW].reshape(-1, ROW)
    return rows[generator.permutation(len(rows))].reshape(-1)


def _encoded(path: Path, tokenizer: str) -> Iterator[int]:
    """Token ids of a .jsonl or .jsonl.zst file's texts, 64 at a time."""
    encode, texts = load_tokenizer(tokenizer).encode_batch, []
    with path.open("rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file) if path.suffix == ".zst" else file
        for line in io.TextIOWrapper(io.BufferedReader(stream), "utf-8"):
            texts.append(orjson.loads(line)["text"])
            if len(texts) == 64:
                for ids in encode(texts):
                    yield from ids
                texts.clear()
    raise DataError(f"`{path}` must hold {TOKENS:,} tokens to draw from, but holds fewer.")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help=".jsonl or .jsonl.zst text (with --tokenizer), or an indexed dataset's prefix")
    parser.add_argument("--tokenizer", help="tokenizer.json that turns text into tokens")
    parser.add_argument("--sizes", type=_numbers, default=[2**k for k in range(10, 15)], help="N, comma-separated")
    parser.add_argument("--hidden", type=_numbers, default=[512, 768], help="D, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; their median is shown")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of outputs and table")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--plain-up-to", type=int, default=2**14, help="largest N for the plain full softmax")
    return parser


if __name__ == "__main__":
    run_command(main)
