"""Times steps with copies of the state in the memory of other nodes, and without, and measures what they take.

OMP_NUM_THREADS=1 tools/bench_copies.py --ranks 2 --every 10

The demo's model on made-up text, trained by ranks that are processes of this machine, each as if on a node of its own;
what they send stays on it. Beside copies: checkpoints written as often in the background. Training stands still for
`stall`, and goes on more slowly while the rest is done; a step is the mean over all, stalls included.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from megahead.errors import existing, run_command
from megahead.report.tables import to_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default: 60)")
    parser.add_argument("--every", type=int, default=10, help="steps between copies (default: 10)")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage (default: 1)")
    parser.add_argument("--config", type=existing, default="configs/demo-headless.yaml", help="another run's YAML file")
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the table's lines there")
    arguments = parser.parse_args()
    from benchmarks.copies import compare

    with tempfile.TemporaryDirectory() as folder:
        lines = compare(
            Path(folder), str(arguments.config), arguments.ranks, arguments.steps, arguments.every, arguments.zero
        )
    if arguments.output:
        arguments.output.write_text(to_json(lines), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
