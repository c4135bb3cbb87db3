"""Kills one of two nodes again and again, and times how long the run stands still: until the next applied step.

tools/bench_node_loss.py --kills 20 --folder /tmp/node-loss

The demo's model on made-up text. Both nodes are agents of launch/elastic.sh on this machine, with a rank each, which
meet at a store in this process. A node is killed with all its processes, either of them by chance, at a random moment;
when the other has gone on alone it is started again, and the next kill comes once both train. Times are those at which
lines of metrics.jsonl appear, so they include all of torchrun's waiting, imports, the checkpoint, and a whole step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from megahead.errors import run_command
from megahead.report.tables import to_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments (default: 1)")
    parser.add_argument("--folder", type=Path, help="where data, run and logs go (default: a temporary folder)")
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the times there")
    arguments = parser.parse_args()
    from benchmarks.node_loss import measure

    with tempfile.TemporaryDirectory() as temporary:
        times = measure(arguments.folder or Path(temporary), arguments.kills, arguments.seed)
    if arguments.output:
        arguments.output.write_text(to_json(times), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
