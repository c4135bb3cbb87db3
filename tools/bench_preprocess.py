"""Times tools/preprocess.py against `datasets.map` and a plain loop over `tokenizers`, on the same file, in one go.

python tools/bench_preprocess.py --input corpus.jsonl --tokenizer 20B_tokenizer.json [--rounds 3] [--skip datasets]

Each program runs in its own process and writes its output to a temporary folder; the programs take turns. The whole
run counts, imports and reading the tokenizer included: CPU seconds of the process and its descendants, and the largest
memory of any one of them. Medians over the rounds are shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from benchmarks.command import build_parser, report
from megahead.errors import DataError, run_command

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

BASELINES = {"loop": PLAIN_LOOP, "datasets": DATASETS_MAP}
Cost = tuple[float, float, float]  # CPU seconds, seconds, and megabytes of the largest process


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--input", required=True, metavar="F", help="one .jsonl file with the key `text`")
    parser.add_argument("--tokenizer", required=True, metavar="T", help="tokenizer.json")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: 3)")
    parser.add_argument("--workers", type=int, help="processes (default: preprocess.py's own choice; 1 for the others)")
    parser.add_argument("--skip", nargs="+", default=[], choices=BASELINES, help="leave out (they are slow)")
    arguments = parser.parse_args()
    source = Path(arguments.input)
    if not source.is_file():
        raise DataError(f"`{source}` must be a .jsonl file, but there is none; check the path.")
    names = [name for name in ("preprocess.py", *BASELINES) if name not in arguments.skip]
    given = str(source), arguments.tokenizer, arguments.workers
    rounds = [[run_timed(name, *given) for name in names] for _ in range(arguments.rounds)]
    megabytes, rows = source.stat().st_size / 1e6, []
    for name, costs in zip(names, zip(*rounds, strict=True), strict=True):
        cpu, wall, peak = (median(values) for values in zip(*costs, strict=True))
        rates = {"MB per CPU-second": f"{megabytes / cpu:.2f}", "MB per second": f"{megabytes / wall:.2f}"}
        rows.append({"": name, **rates, "peak MB of a process": round(peak)})
    print(f"{megabytes:.1f} MB of jsonl")
    report(rows, output=arguments.output)


def run_timed(name: str, source: str, tokenizer: str, workers: int | None) -> Cost:
    """Runs one program; DataError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        if name in BASELINES:
            command = [sys.executable, "-c", BASELINES[name], source, tokenizer, folder, str(workers or 1)]
        else:
            command = [sys.executable, str(TOOL), "--input", source, "--tokenizer", tokenizer]
            command += ["--output", f"{folder}/out", *(["--workers", str(workers)] if workers else [])]
        quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        started = time.monotonic()
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=quiet)
            cpu, peak = sample_usage(process)
            errors.seek(0)
            last_lines = [f"exit code {process.returncode}", *errors.read().decode().split("\n")]
        if process.returncode:
            reason = [line for line in last_lines if line.strip()][-1]
            raise DataError(f"`{name}` must run to its end to be timed, but failed: {reason}")
        return cpu, time.monotonic() - started, peak


def sample_usage(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """CPU seconds of a process and its descendants, and megabytes of the largest of them, sampled until it ends.

    Pool workers are orphans by the time they end, so each is sampled while it lives.
    """
    cpu: dict[int, float] = {}
    peak, root = 0.0, psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            for member in (root, *root.children(recursive=True)):
                cpu[member.pid] = sum(member.cpu_times()[:2])
                peak = max(peak, member.memory_info().rss / 1e6)
        time.sleep(0.005)
    return sum(cpu.values()), peak


if __name__ == "__main__":
    run_command(main)
