"""Runs all measurements that need a GPU, within a time budget, and writes a report.

tools/gpu_report.py                                     45 minutes, without trainings
tools/gpu_report.py --dataset build/gpu-text/text       with trainings, on the dataset of `make gpu-text`
tools/gpu_report.py --only loss step-70m --minutes 5
tools/gpu_report.py --dry                               tiny, on the CPU, as a test

Parts run by priority: what a launch costs the host; whole steps of the engine, headless against vanilla, of three
models and vocabularies, and with each way of computing them on or off; the loss beside third-party kernels; steps
without an engine, plain and compiled; DeepSpeed's overhead; host waits; profiles of steps; with a text (of at most
50,277 ids) real trainings of 70 M parameters with 50,277 and 131,072 ids, of 80 M tokens each at 25 % MFU of an H100,
which also share the spare time; more steps and waits; and the tests that need a GPU. Each is a separate process with a
time limit.
report.json and report.md are rewritten after each part; a second call runs the parts that are missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpu_parts.session import DRY, DRY_RUN, FULL, ON_A_GPU, Session, Text, build_parts
from megahead.errors import FieldError, existing_path, run_command
from megahead.report.tables import terminal, to_rich

ZIPF_TOKENS, DRY_TOKENS = 2_000_000, 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45, help="for all parts together (default: 45)")
    parser.add_argument("--folder", type=Path, help="default: runs/gpu-report, of a dry run runs/gpu-report-dry")
    parser.add_argument("--dataset", type=_prefix, metavar="PREFIX", help="what to train on, as preprocess.py made it")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="these parts alone")
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    parser.add_argument("--again", action="store_true", help="also measure what an earlier call has measured")
    parser.add_argument("--dry", action="store_true", help="everything tiny, on the CPU")
    arguments = parser.parse_args()
    folder = (arguments.folder or Path("runs/gpu-report-dry" if arguments.dry else "runs/gpu-report")).absolute()
    text = Text(folder, arguments.dataset)
    parts = build_parts(DRY if arguments.dry else FULL, text, folder)
    console = terminal()
    if arguments.list:
        console.print(to_rich([{"part": part.name, "about, s": part.seconds, "": part.question} for part in parts]))
        return
    if unknown := set(arguments.only) - {part.name for part in parts}:
        raise FieldError("--only", "name parts that --list has", got=", ".join(sorted(unknown)))
    session = Session(folder, console, title=DRY_RUN if arguments.dry else ON_A_GPU, again=arguments.again)
    text.write_zipf(DRY_TOKENS if arguments.dry else ZIPF_TOKENS)
    wanted = [part for part in parts if not arguments.only or part.name in arguments.only]
    session.run_parts(wanted, arguments.minutes * 60)
    console.print(f"wrote {folder}/report.md and report.json", soft_wrap=True)


def _prefix(text: str) -> Path:
    """The absolute prefix of a dataset, since parts run in the project's root."""
    return existing_path(f"{text}.idx").absolute().with_suffix("")


if __name__ == "__main__":
    run_command(main)
