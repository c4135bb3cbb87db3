"""Counts where a training step makes the host wait for the GPU, and who asks for it: we, DeepSpeed, the backward pass.

tools/count_waits.py --config configs/pythia-70m-headless.yaml [--set a.b=c] [--steps 5]

Trains a few steps as launch/pretrain.py does (one process, no evaluation, nothing kept) with CUDA's synchronisation
warnings on. A step has to be told its losses and its gradient norm before it is applied, which are two waits of ours;
there is none between its micro-batches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megahead import wording
from megahead.config.loading import load_config
from megahead.errors import UserError, run_command
from megahead.report.tables import to_json, to_rich
from megahead.terminal import terminal


def main() -> None:
    arguments = _parser().parse_args()
    config = load_config(arguments.config, arguments.set)
    import torch

    from benchmarks.waits import BACKWARD, OWNERS, counted

    if not torch.cuda.is_available():
        raise UserError("the machine must have a CUDA device to count waits on, but has none.")
    waits = counted(config, arguments.steps)
    console = terminal(width=160)
    rows = [{"who": who, "a step": n / arguments.steps, "where": line} for (who, line), n in waits.most_common()]
    console.print(to_rich(rows))
    if arguments.output:
        arguments.output.write_text(to_json(rows), encoding="utf-8")
    for who in (*OWNERS.values(), BACKWARD):
        total = sum(n for (owner, _), n in waits.items() if owner == who)
        console.print(f"{who}: {wording.counted(total / arguments.steps, 'wait', 'g')} a step")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one setting")
    parser.add_argument("--steps", type=int, default=5, help="steps to count (default: 5)")
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the table's lines there")
    return parser


if __name__ == "__main__":
    run_command(main)
