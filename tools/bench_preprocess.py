"""Times tools/preprocess.py against `datasets.map` and a plain loop over `tokenizers`, on the same file, in one go.

tools/bench_preprocess.py --input corpus.jsonl --tokenizer 20B_tokenizer.json [--rounds 3] [--skip datasets]

Each is a process of its own that writes what it makes to a temporary folder; the contestants take turns. Counted is
all of it, imports and the reading of the tokenizer included: CPU seconds of the process and its children, and the
largest memory that any one process of it had.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.table import Table

from megahead.errors import DataError, run_command
from megahead.terminal import terminal

TOOL = Path(__file__).with_name("preprocess.py")

PLAIN_LOOP = """
import json, sys, numpy, tokenizers
source, vocabulary, folder, workers = sys.argv[1:]
tokenizer = tokenizers.Tokenizer.from_file(vocabulary)
with open(source) as lines, open(f"{folder}/out.bin", "wb") as out:
    for line in lines:
        ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        out.write(numpy.array([*ids, 0], numpy.uint16).tobytes())
"""

DATASETS_MAP = """
import sys, datasets, tokenizers
source, vocabulary, folder, workers = sys.argv[1:]
tokenizer = tokenizers.Tokenizer.from_file(vocabulary)
def encode(batch):
    return {"ids": [e.ids + [0] for e in tokenizer.encode_batch(batch["text"], add_special_tokens=False)]}
text = datasets.load_dataset("json", data_files=source, split="train", cache_dir=folder)
text.map(encode, batched=True, remove_columns=text.column_names, num_proc=int(workers)).save_to_disk(f"{folder}/out")
"""


@dataclass(frozen=True)
class Cost:
    """What one run used."""

    seconds: float
    cpu_seconds: float
    peak_megabytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Time preprocessing against two other ways.")
    parser.add_argument("--input", required=True, metavar="F", help="one .jsonl file with the key `text`")
    parser.add_argument("--tokenizer", required=True, metavar="T", help="tokenizer.json")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: 3)")
    parser.add_argument("--workers", type=int, help="processes (default: preprocess.py's own choice; 1 for the others)")
    parser.add_argument("--skip", nargs="+", default=[], choices=("loop", "datasets"), help="leave out (they are slow)")
    arguments = parser.parse_args()
    if not Path(arguments.input).is_file():
        raise DataError(f"`{arguments.input}` must be a .jsonl file, but there is none; check the path.")
    costs: dict[str, list[Cost]] = {}
    for _ in range(arguments.rounds):
        for name in contestants(arguments.skip):
            costs.setdefault(name, []).append(timed(name, arguments.input, arguments.tokenizer, arguments.workers))
    terminal().print(table(costs, Path(arguments.input).stat().st_size / 1e6))


def contestants(skipped: list[str]) -> list[str]:
    return [name for name in ("preprocess.py", "loop", "datasets") if name not in skipped]


def timed(name: str, source: str, tokenizer: str, workers: int | None) -> Cost:
    """Runs one contestant; DataError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        programs = {"loop": PLAIN_LOOP, "datasets": DATASETS_MAP}
        if name in programs:
            command = [sys.executable, "-c", programs[name], source, tokenizer, folder, str(workers or 1)]
        else:
            command = [sys.executable, str(TOOL), "--input", source, "--tokenizer", tokenizer]
            command += ["--output", f"{folder}/out", *(["--workers", str(workers)] if workers else [])]
        quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=quiet)
        cpu, peak = watched(process)
        errors = process.stderr.read().decode() if process.stderr else ""
        if process.returncode:
            raise DataError(f"`{name}` must run to its end to be timed, but failed: {errors.strip().splitlines()[-1]}")
        return Cost(time.monotonic() - started, cpu, peak)


def watched(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """(CPU seconds, megabytes of the largest process) of a process and all that come from it, sampled till it ends.

    Pool workers are nobody's children by the time they end, so each is asked while it lives.
    """
    seen: dict[int, tuple[float, float]] = {}
    root = psutil.Process(process.pid)
    while process.poll() is None:
        for member in [root, *children(root)]:
            try:
                times, memory = member.cpu_times(), member.memory_info().rss / 1e6
            except psutil.Error:
                continue
            _, before = seen.get(member.pid, (0.0, 0.0))
            seen[member.pid] = (times.user + times.system, max(before, memory))
        time.sleep(0.005)
    return sum(cpu for cpu, _ in seen.values()), max(peak for _, peak in seen.values())


def children(root: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = root.children(recursive=True)
        return found
    except psutil.Error:
        return []


def table(costs: dict[str, list[Cost]], megabytes: float) -> Table:
    """Medians over the rounds."""
    shown = Table(
        "", "MB per CPU-second", "MB per second", "peak MB of a process", title=f"{megabytes:.1f} MB of jsonl"
    )
    for name, runs in costs.items():
        cpu, wall, peak = (
            statistics.median(values)
            for values in zip(*((run.cpu_seconds, run.seconds, run.peak_megabytes) for run in runs), strict=True)
        )
        shown.add_row(name, f"{megabytes / cpu:.2f}", f"{megabytes / wall:.2f}", f"{peak:.0f}")
    return shown


if __name__ == "__main__":
    run_command(main)
