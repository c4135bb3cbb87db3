"""Times the loss alone, forward and backward, and its peak memory: the paper's form, ours, and the full softmax.

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
from typing import Any

import numpy as np

from benchmarks.command import numbers, parser_of, zipf_tokens
from megahead.data.indexed import IndexedDataset
from megahead.errors import DataError, run_command

VOCABULARY = 50304
TOKENS = 1_000_000  # of a dataset, so many are read: rows from here and there, as a shuffled batch has them
ROW = 512
ERROR_SIZE = 1024  # targets that errors against float64 are measured on
Array = np.ndarray[Any, Any]


def read_targets(source: str | None, least: int) -> Array:
    """int64, `least` targets or more: of an indexed dataset, or by Zipf's law. DataError where it has fewer."""
    if source is None:
        return zipf_tokens(VOCABULARY, max(least, 2**15), seed=0)
    dataset = IndexedDataset(source)
    dataset.expect_ids_below(VOCABULARY)
    most = max(TOKENS, -(-least // ROW) * ROW)
    tokens = dataset.read(0, min(most, dataset.num_tokens)).astype(np.int64)
    rows = tokens[: len(tokens) // ROW * ROW].reshape(-1, ROW)
    if rows.size < least:
        raise DataError(
            f"`{source}` must hold {least:,} tokens in rows of {ROW}, as --sizes asks, but holds {rows.size:,}; name "
            "smaller sizes or a longer text."
        )
    return rows[np.random.default_rng(0).permutation(len(rows))].reshape(-1)


def main() -> None:
    arguments = _parser().parse_args()
    targets = read_targets(arguments.data, max(*arguments.sizes, ERROR_SIZE))
    import torch  # what is wrong with the text is reported before

    from benchmarks.losses import compare

    torch.set_num_threads(arguments.threads)
    compare(torch.from_numpy(targets).to(arguments.device), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--data", metavar="PREFIX", help="indexed dataset of at most 50,304 ids")
    parser.add_argument("--sizes", type=numbers, default=[2**k for k in range(10, 15)], help="N, comma-separated")
    parser.add_argument("--hidden", type=numbers, default=[512, 768], help="D, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; their median is shown")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of outputs and table")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--plain-up-to", type=int, default=2**14, help="largest N for the plain full softmax")
    return parser


if __name__ == "__main__":
    run_command(main)
