"""Trains a small model on several nodes for hours, while faults of all kinds happen to them, and sees what is lost.

PYTHONPATH=.:tests python tests/soak --folder /tmp/soak --hours 3             a fault every minute; goes on after a stop
PYTHONPATH=.:tests python tests/soak --folder /tmp/soak --hours 3 --finish    none any more: to the end, and compare

Nodes are namespaces of this machine (root, ip, /dev/net/tun, loop devices): each has a network, processes, a name and a
memory of its own, and runs launch/elastic.sh. Ranks are killed or stopped; nodes are killed, switched off, frozen,
asked to leave, and come back; their network is cut or slow, their clock jumps; the disk and the memory for copies fill
up; checkpoints, copies and weights are damaged; the place where nodes meet is lost. The seed decides which, when and
where: events.jsonl tells. After the last one the run trains to its end undisturbed; so does a twin, all the way, which
has as many ranks at every step, and both must have the same bits. With --ranks fixed training waits for lost nodes,
else it goes on with those that are there.

Stop it with Ctrl-C or SIGTERM: all ranks save first. What the run says is in node-*.log, the outcome in soak.md and
soak.json. It ends with exit code 2 where the run does not recover from a fault, and leaves all as it is then.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megahead.errors import existing_path, run_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where all of it goes, and goes on")
    parser.add_argument("--hours", type=float, default=3.0, help="with faults, all sittings together (default: 3)")
    parser.add_argument("--finish", action="store_true", help="no more faults")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--hosts", type=int, choices=(2, 3, 4), default=2, help="nodes (default: 2)")
    parser.add_argument(
        "--every", type=float, default=60.0, help="seconds from event to event, on average (default: 60)"
    )
    parser.add_argument("--ranks", choices=("any", "fixed"), default="any", help="default: any")
    parser.add_argument("--pace", type=float, default=0.25, help="seconds that a step takes at least (default: 0.25)")
    parser.add_argument("--kinds", help="only these kinds of faults, by commas (default: all)")
    parser.add_argument("--text", type=existing_path, metavar="FILE.idx", help="a dataset instead of docs/")
    parser.add_argument("--ids", type=int, default=256, help="of that dataset (default: 256)")
    arguments = parser.parse_args()
    from soak.course import Settings, soak
    from soak.faults import KINDS

    kinds = arguments.kinds.split(",") if arguments.kinds else sorted(KINDS)
    settings = Settings(arguments.seed, arguments.hosts, arguments.every, arguments.ranks, arguments.pace, kinds)
    text = (arguments.text.with_suffix(""), arguments.ids) if arguments.text else None
    soak(arguments.folder, settings, 0.0 if arguments.finish else 3600 * arguments.hours, text)


if __name__ == "__main__":
    run_command(main)
