"""Times the loss alone, forward and backward, and its peak memory: the paper's form, ours, and the full softmax.

tools/bench_loss.py --data docs.jsonl.zst --tokenizer 20B_tokenizer.json
tools/bench_loss.py --data PREFIX --sizes 1024,4096 --hidden 512
tools/bench_loss.py --device cuda --precision bf16 --sizes 4096,16384,65536

All begin with outputs [N, D], targets [N] and the table [V, D], and end with the gradients of outputs and table. They
are measured in turn (A B C D A B C D ...), so that a noisy machine hits all alike; on a CPU each time in a forked
process of its own, so that no memory is shared. On CUDA candidates are chosen and looked up before, as a step's are:
the headless forms begin with the candidates' rows. Many passes in a row are timed by the device's clock, with nothing
that waits between them; `host s` is how long it takes to ask for one. Liger's fused linear cross-entropy and Apple's
cut-cross-entropy take part where they are installed. Errors against float64 follow at the end. Without --data, targets
come from Zipf's law.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.targets import ERROR_SIZE, read_targets
from megahead.errors import run_command


def main() -> None:
    arguments = _parser().parse_args()
    targets = read_targets(arguments.data, arguments.tokenizer, max(*arguments.sizes, ERROR_SIZE))
    import torch  # what is wrong with the text is told before

    from benchmarks.losses import compare

    torch.set_num_threads(arguments.threads)
    compare(torch.from_numpy(targets).to(arguments.device), arguments)


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
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the numbers there")
    return parser


if __name__ == "__main__":
    run_command(main)
