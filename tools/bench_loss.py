"""Measures time and peak memory of the loss alone, forward and backward: the paper's, ours, and the full softmax.

python tools/bench_loss.py --data PREFIX --sizes 1024,4096 --hidden 512
python tools/bench_loss.py --device cuda --precision bf16 --sizes 4096,16384,65536

Each takes outputs [N, D], targets [N] and the embedding table [V, D], and computes the gradients of outputs and table.
They are measured in turn (A B C D A B C D ...), so that noise affects all alike; on a CPU each in a newly forked
process, so that no memory is shared. On CUDA candidates are chosen and looked up beforehand, as in a training step:
headless losses take their rows. Many passes in a row are timed by CUDA events, without synchronization
between them; `host s` is the host's time to launch one. Liger's fused linear cross-entropy and Apple's
cut-cross-entropy join where installed. Errors against float64 follow. Without --data, targets are Zipf-distributed.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.command import PADDED_PYTHIA_VOCABULARY, build_parser, parse_integers, zipf_tokens
from megahead.data.indexed import IndexedDataset
from megahead.errors import DataError, run_command

MAX_TOKENS = 1_000_000  # read from a dataset; its rows are shuffled
ROW_LENGTH = 512
Array = np.ndarray[Any, Any]


def read_targets(source: str | None, min_targets: int) -> Array:
    """Returns at least `min_targets` int64 targets, of an indexed dataset or Zipf-distributed. DataError for fewer."""
    if source is None:
        return zipf_tokens(PADDED_PYTHIA_VOCABULARY, max(min_targets, 2**15), seed=0)
    dataset = IndexedDataset(source)
    dataset.expect_ids_below(PADDED_PYTHIA_VOCABULARY)
    max_tokens = max(MAX_TOKENS, -(-min_targets // ROW_LENGTH) * ROW_LENGTH)
    tokens = dataset.read(0, min(max_tokens, dataset.num_tokens)).astype(np.int64)
    rows = tokens[: len(tokens) // ROW_LENGTH * ROW_LENGTH].reshape(-1, ROW_LENGTH)
    if rows.size < min_targets:
        raise DataError(
            f"`{source}` must hold {min_targets:,} tokens in rows of {ROW_LENGTH}, as --sizes asks, but holds "
            f"{rows.size:,}; name smaller sizes or a longer text."
        )
    return rows[np.random.default_rng(0).permutation(len(rows))].reshape(-1)


def main() -> None:
    arguments = _parser().parse_args()
    targets = read_targets(arguments.data, max(arguments.sizes))
    import torch  # after the check of the text: importing torch takes seconds

    from benchmarks.losses import compare_losses

    torch.set_num_threads(arguments.threads)
    compare_losses(torch.from_numpy(targets).to(arguments.device), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = build_parser(__doc__)
    parser.add_argument("--data", metavar="PREFIX", help="indexed dataset of at most 50,304 ids")
    parser.add_argument("--sizes", type=parse_integers, default="1024,2048,4096,8192,16384", help="N, comma-separated")
    parser.add_argument("--hidden", type=parse_integers, default=[512, 768], help="D, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; their median is shown")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of outputs and table")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--plain-up-to", type=int, default=2**14, help="largest N for the plain full softmax")
    return parser


if __name__ == "__main__":
    run_command(main)
