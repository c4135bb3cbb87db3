"""Kills a run of two ranks at random moments, resumes it each time, and compares the end with an undisturbed run.

PYTHONPATH=.:tests python tests/runs/kill_and_resume.py [--kills 100] [--seed 0] [--background]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from killable import codes, said, start_ranks
from small_run import same_tensors, small_config, stage, write_text

from megahead.checkpoint import newest_sound
from megahead.report.metrics import read_metrics


@dataclass
class Toll:
    """What was done to a run."""

    kills: int = 0
    of_one_rank: int = 0
    """Kills of one rank only; the other had to end by itself."""

    in_a_save: int = 0
    """Kills that left a checkpoint half written."""

    while_starting: int = 0
    """Kills before a step of the session was logged."""

    seconds: float = 0.0


def torture(folder: Path, kills: int, seed: int, zero: int = 1, background: bool = False) -> Toll:
    """AssertionError when a checkpoint is lost or the end differs."""
    write_text(folder, documents=40)
    changes = stage(zero) | {
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.num_heads": 2,
        "data.validation": None,
        "batch.global_size": 4,
        "training.steps": 8 * kills + 10,
        "training.checkpoint_every": 2,
        "training.save_in_background": background,
        "engine.timeout_seconds": 30,
    }
    undisturbed = small_config(folder, changes | {"output_dir": str(folder / "undisturbed")})
    assert codes(start_ranks(undisturbed, 2, folder), 600) == [0, 0], said(folder, 0)
    config, chance, toll = small_config(folder, changes), random.Random(seed), Toll()
    run, started, newest = folder / "run", time.monotonic(), 0
    while toll.kills < kills:
        lines = _lines(run)
        ranks = start_ranks(config, 2, folder)
        _wait_for_a_moment(run, ranks, chance)
        one_only = chance.random() < 0.2
        for rank in [chance.choice(ranks)] if one_only else ranks:
            rank.kill()
        assert None not in codes(ranks, 90), f"a rank survived the other: {said(folder, 0)} {said(folder, 1)}"
        toll.kills += 1
        toll.of_one_rank += one_only
        toll.while_starting += _lines(run) == lines
        toll.in_a_save += any((run / "checkpoints").glob(".step-*.partial"))
        checkpoint, damage = newest_sound(run)
        step = 0 if checkpoint is None else checkpoint.step
        assert step >= newest, f"the checkpoint of step {newest} is lost"
        assert not damage, damage
        newest = step
    assert newest < config.training.steps, "the run ended before all kills"
    assert codes(start_ranks(config, 2, folder), 600) == [0, 0], said(folder, 0)
    toll.seconds = time.monotonic() - started
    _compare(run, folder / "undisturbed")
    return toll


def _wait_for_a_moment(run: Path, ranks: list[BaseProcess], chance: random.Random) -> None:
    """One time in six some moment of the start; else until a few more steps are logged and a moment more, half of
    these times within the save that comes next."""
    if chance.random() < 1 / 6:
        time.sleep(chance.uniform(0, 2))
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
    parser.add_argument("--background", action="store_true", help="save in the background")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        toll = torture(Path(folder), arguments.kills, arguments.seed, background=arguments.background)
    print(f"{toll}: weights, optimizer state and curve as undisturbed, no checkpoint lost")


if __name__ == "__main__":
    main()
