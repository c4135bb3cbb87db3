"""Times each command from its start to its first line, on the files that `megahead start` left in a folder.

megahead start my-texts --minutes 2 --folder made
tools/bench_first_lines.py made [--rounds 3]

A command is stopped at its first line, on stdout or stderr, a progress bar's included. CPU seconds are those of its
process until then, and hardly depend on what else runs. Medians over the rounds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from benchmarks.command import build_parser, report
from megahead.errors import existing_path, run_command


def commands(folder: Path, outputs: Path) -> Iterator[list[str]]:
    """A line for each command, `convert`'s subcommands and `pretrain --dry-run`, which write to the empty `outputs`."""
    config, run, model, text = (str(folder / name) for name in ("run.yaml", "run", "model", "text"))
    card, tokenizer = f"{model}/README.md", next(iter(folder.glob("*tokenizer*.json")))
    words, data = outputs / "words.txt", outputs / "data"
    words.write_text("a few words " * 10_000)
    data.mkdir()  # empty: that is noticed after the first line
    yield ["train-tokenizer", "--input", card, "--vocab-size", "300", "--output", f"{outputs}/tokenizer.json"]
    yield ["preprocess", "--input", card, "--tokenizer", str(tokenizer), "--output", f"{outputs}/ids"]
    yield ["merge-datasets", "--input", text, f"{text}-validation", "--output", f"{outputs}/merged"]
    yield ["inspect-dataset", text]
    yield ["start", str(words), "--folder", f"{outputs}/start"]
    yield ["doctor"]
    yield ["estimate", "--config", config]
    yield ["pretrain", "--dry-run", "--config", config]
    yield ["pretrain", "--config", config, "--set", f"output_dir={outputs}/run"]
    yield ["convert", "to-hf", "--checkpoint", run, "--output", f"{outputs}/model", "--head", "pmi"]
    yield ["convert", "from-hf", "--model", model, "--output", f"{outputs}/imported"]
    yield ["convert", "revocabulary", "--model", run, "--tokenizer", str(tokenizer), "--output", f"{outputs}/other"]
    yield ["convert", "items", "--model", run, "--output", f"{outputs}/items"]
    yield ["generate", "--model", model, "--prompt", "The"]
    yield ["embed", "--model", model, "--input", card, "--output", f"{outputs}/vectors.npy"]
    yield ["eval-harness", "--model", model, "--tasks", "bits_per_byte", "--text", card]
    yield [
        "finetune",
        "--model",
        model,
        "--task",
        "glue/cola",
        "--data",
        str(data),
        "--output",
        f"{outputs}/scores.json",
    ]
    yield ["pseudo-perplexity", "--model", model, "--input", card]
    yield ["synonyms", "--model", model, "--wordnet", str(data)]
    yield ["plot", run, "--output", f"{outputs}/curves.png"]
    yield ["report", run, "--output", f"{outputs}/report.html"]
    yield ["inspect-checkpoint", run]


def time_first_line(command: list[str]) -> tuple[float, float, str]:
    """CPU seconds and seconds until the first line, and the line."""
    start_time, streams = time.monotonic(), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(
        [sys.executable, "-m", "megahead", *command],
        stdin=subprocess.DEVNULL, start_new_session=True, text=True, **streams,
    ) as process:  # type: ignore[call-overload]  # fmt: skip
        line = process.stdout.readline()
        seconds, cpu_times = time.monotonic() - start_time, psutil.Process(process.pid).cpu_times()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return cpu_times.user + cpu_times.system, seconds, line.rstrip()


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("folder", type=existing_path, metavar="FOLDER", help="which `megahead start` made")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: 3)")
    arguments = parser.parse_args()
    report(_rows(arguments.folder, arguments.rounds), output=arguments.output)


def _rows(folder: Path, rounds: int) -> list[dict[str, object]]:
    timings: dict[str, list[tuple[float, float, str]]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as outputs:
            for command in commands(folder, Path(outputs)):
                has_variants = command[0] == "convert" or command[1:2] == ["--dry-run"]
                name = " ".join(command[: 1 + has_variants])
                timings.setdefault(name, []).append(time_first_line(command))
    rows: list[dict[str, object]] = []
    for name, rounds_of_command in timings.items():
        cpu_seconds, seconds, lines = zip(*rounds_of_command, strict=True)
        figures = {"CPU s": round(median(cpu_seconds), 2), "s": round(median(seconds), 2)}
        rows.append({"command": name, **figures, "first line": lines[-1][:60]})
    return rows


if __name__ == "__main__":
    run_command(main)
