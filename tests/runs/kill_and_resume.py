"""Kills a run of two ranks at random moments, resumes it each time, and compares the end with an undisturbed run.

PYTHONPATH=.:tests python tests/runs/kill_and_resume.py [--kills 100] [--seed 0] [--zero 1] [--offload] [--background]
    [--rows] [--vocabulary 1048576]

Where only one rank is killed the other must end by itself: `engine.timeout_seconds` after it began to wait for one that
was not even there, and a few more. When it does not, the stacks of all its threads are shown.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megahead.checkpoints.reading import newest_valid
from megahead.config.run import RunConfig
from megahead.report.read import read_metrics
from support.killable import codes, said, start_ranks
from support.small_run import offloaded, same_tensors, small_config, stage, write_text

TIMEOUT_SECONDS = 30
SURVIVAL_SECONDS = TIMEOUT_SECONDS + 15


@dataclass
class Toll:
    """What was done to the runs."""

    kills: int = 0
    of_one_rank: int = 0
    """Kills of one rank only; the other had to end by itself."""

    outlived: float = 0.0
    """How many seconds it took for it, at most."""

    in_a_save: int = 0
    """Kills that left a checkpoint half written."""

    while_starting: int = 0
    """Kills before a step of the session was logged."""

    runs: int = 0
    """Runs that reached their end and were compared; a run that does so early is followed by another."""

    seconds: float = 0.0


def torture(folder: Path, kills: int, seed: int, changes: dict[str, Any] | None = None) -> Toll:
    """AssertionError when a checkpoint is lost, an end differs, or a rank outlives the other for too long."""
    write_text(folder, documents=40)
    small: dict[str, Any] = {
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.num_heads": 2,
        "data.validation": None,
        "batch.global_size": 4,
        "training.steps": 8 * kills + 10,
        "training.checkpoint_every": 2,
        "engine.timeout_seconds": TIMEOUT_SECONDS,
    }
    small |= changes or {}
    undisturbed = small_config(folder, small | {"output_dir": str(folder / "undisturbed")})
    start_seconds = _finish(undisturbed, folder)
    config, chance, toll = small_config(folder, small), random.Random(seed), Toll()
    run, started, newest = folder / "run", time.monotonic(), 0
    while toll.kills < kills:
        if _killed(config, folder, start_seconds, chance, toll):
            newest = _kept(run, newest)
        else:
            _compare(run, folder / "undisturbed")
            shutil.rmtree(run)
            toll.runs, newest = toll.runs + 1, 0
    _finish(config, folder)
    _compare(run, folder / "undisturbed")
    toll.runs, toll.seconds = toll.runs + 1, time.monotonic() - started
    return toll


def _finish(config: RunConfig, folder: Path) -> float:
    """Lets a run end by itself; the seconds until its first step was logged."""
    run, started = Path(config.output_dir or ""), time.monotonic()
    lines, ranks = _lines(run), start_ranks(config, 2, folder)
    while _lines(run) == lines and any(rank.is_alive() for rank in ranks):
        time.sleep(0.001)
    start_seconds = time.monotonic() - started
    assert codes(ranks, 600) == [0, 0], said(folder, 0)
    return start_seconds


def _killed(config: RunConfig, folder: Path, start_seconds: float, chance: random.Random, toll: Toll) -> bool:
    """Starts or resumes the run and kills it at some moment; False when it reached its end before that moment."""
    run = folder / "run"
    lines, ranks = _lines(run), start_ranks(config, 2, folder)
    _wait_for_a_moment(run, ranks, start_seconds, chance)
    one_only, died = chance.random() < 1 / 2, time.monotonic()
    for rank in [chance.choice(ranks)] if one_only else ranks:
        rank.kill()
    ended = codes(ranks, SURVIVAL_SECONDS)
    assert None not in ended, f"a rank survived the other: {said(folder, 0)} {said(folder, 1)}"
    assert {*ended} <= {0, 2, -signal.SIGKILL}, f"ranks ended with {ended}: {said(folder, 0)} {said(folder, 1)}"
    if ended == [0, 0]:
        return False
    toll.kills += 1
    toll.of_one_rank += one_only
    toll.outlived = max(toll.outlived, one_only * (time.monotonic() - died))
    toll.while_starting += _lines(run) == lines
    toll.in_a_save += any((run / "checkpoints").glob(".step-*.partial"))
    return True


def _kept(run: Path, newest: int) -> int:
    """The step of the newest checkpoint, which is sound and not older than `newest`."""
    checkpoint, damage = newest_valid(run)
    step = 0 if checkpoint is None else checkpoint.step
    assert step >= newest, f"the checkpoint of step {newest} is lost"
    assert not damage, damage
    return step


def _wait_for_a_moment(run: Path, ranks: list[BaseProcess], start_seconds: float, chance: random.Random) -> None:
    """One time in three some moment of the start; else until a few more steps are logged and a moment more, half of
    these times within the save that comes next."""
    if chance.random() < 1 / 3:
        time.sleep(chance.uniform(0, start_seconds))
        return
    target, deadline = _lines(run) + chance.randrange(1, 9), time.monotonic() + 60
    saving = chance.random() < 1 / 2
    while time.monotonic() < deadline and all(rank.is_alive() for rank in ranks):
        if _lines(run) >= target and (not saving or any((run / "checkpoints").glob(".step-*.partial"))):
            break
        time.sleep(0.0005)
    time.sleep(chance.uniform(0, 0.01 if saving else 0.04))


def _lines(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _compare(run: Path, undisturbed: Path) -> None:
    curves = [
        [(line["step"], line["tokens"], line["loss"], line["gradient_norm"]) for line in read_metrics(folder).training]
        for folder in (run, undisturbed)
    ]
    assert curves[0] == curves[1], "the curves differ"
    assert same_tensors(run, undisturbed), "the weights differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage")
    parser.add_argument("--offload", action="store_true", help="the optimizer in the host's memory")
    parser.add_argument("--background", action="store_true", help="save in the background")
    parser.add_argument("--rows", action="store_true", help="the embedding in rows")
    parser.add_argument("--vocabulary", type=int, metavar="IDS", help="of the embedding (default: a hundred)")
    arguments = parser.parse_args()
    changes = offloaded(arguments.zero) if arguments.offload else stage(arguments.zero)
    changes["training.save_in_background"] = arguments.background
    changes["engine.embedding"] = "rows" if arguments.rows else "dense"
    if arguments.vocabulary:
        changes["model.vocab_size"] = arguments.vocabulary
    with tempfile.TemporaryDirectory() as folder:
        toll = torture(Path(folder), arguments.kills, arguments.seed, changes)
    print(f"{toll}: weights, optimizer state and curve as undisturbed, no checkpoint lost")


if __name__ == "__main__":
    main()
