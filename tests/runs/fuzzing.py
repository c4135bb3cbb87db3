"""Mutates configs, datasets and checkpoints at random, and starts a run on each: it must train, or end with a sentence.

PYTHONPATH=.:tests python tests/runs/fuzzing.py configs|files [--count 1000] [--seed 0]

Never a traceback, never a hang (a run that was asked to stop ends within a minute), never a write outside the run
folder (but for the tables of rows that `pack: best_fit` keeps beside its dataset). Of those that are sound up to where
the model is built, one in `TRAINED` trains.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from megahead.config.loading import load_config
from megahead.distributed.launch import Launch
from megahead.errors import run_command
from megahead.train import run as setup
from megahead.train.run import pretrain
from support.killable import speak_to
from support.small_checkpoint import save_tokenizer
from support.small_run import small_config, write_text

MEMORY = 6 << 30
TRAINED = 5
TIMEOUT_SECONDS, MERCY = 8.0, 60.0
"""Seconds until a run is asked to stop, and until it counts as hanging."""

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 10**18, -(10**30), 0.0, 0.5, -0.1, 1e-300, 1e308, float("nan"),
    float("inf"), "", " ", "auto", "nowhere", "../outside", "/proc/version", "text", "x" * 5000, "\0", "é\n", "1e-4",
    [], [1], [None, "a"], {}, {"a": 1}, {"prefix": "text"}, [{"prefix": "text"}], [{"prefix": "text", "weight": 2}],
]  # fmt: skip


def fuzz_configs(folder: Path, count: int, seed: int) -> Counter[str]:
    """How many of `count` runs of mutated configs ended how; AssertionError with the first that ended badly."""
    base = small_config(Path(), TINY).model_dump(mode="json")
    base["data"] |= {"train": "text", "validation": "text", "tokenizer": "tokenizer.json"}
    base["output_dir"] = "run"

    def prepare(sandbox: Path, chance: random.Random) -> str:
        shutil.copytree(folder / "fresh", sandbox)
        tree = copy.deepcopy(base)
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            _mutate_tree(tree, chance)
        text = yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "replace")
        text = _mutate_bytes(text, chance) if chance.random() < 0.15 else text
        (sandbox / "run.yaml").write_bytes(text)
        return text.decode(errors="replace")

    _make_fresh(folder / "fresh")
    return _fuzz(folder, count, seed, prepare)


def fuzz_files(folder: Path, count: int, seed: int) -> Counter[str]:
    """The same with runs that resume, one file of whose dataset or checkpoints is mutated."""
    fresh = folder / "fresh"
    _make_fresh(fresh)
    changes = TINY | {"training.checkpoint_every": 1, "data.train": "text", "data.validation": "text"}
    tree = small_config(Path(), changes | {"output_dir": "run"}).model_dump(mode="json")
    for steps in (2, 3):
        tree["training"]["steps"] = steps
        (fresh / "run.yaml").write_text(yaml.safe_dump(tree))
        if steps == 2:
            code, output = _start(fresh)
            assert code == 0, output

    def prepare(sandbox: Path, chance: random.Random) -> str:
        shutil.copytree(fresh, sandbox)
        files = sorted(path for path in sandbox.rglob("*") if path.is_file() and "tensorboard" not in path.parts)
        file, other = chance.choice(files), chance.choice(files)
        kind = chance.choice(["bytes", "bytes", "delete", "folder", "swap", "json"])
        if kind == "bytes":
            file.write_bytes(_mutate_bytes(file.read_bytes(), chance))
        elif kind == "swap":
            shutil.copyfile(other, file) if other != file else None
        elif kind == "json":
            file = chance.choice([path for path in files if path.suffix == ".json"])
            _mutate_json(file, chance)
        else:
            file.unlink()
            if kind == "folder":
                file.mkdir()
        return f"{kind} {file.relative_to(sandbox)}"

    return _fuzz(folder, count, seed, prepare)


TINY: dict[str, Any] = {
    "model.num_layers": 1,
    "model.vocab_size": 300,  # the tokenizer's 278 fit
    "training.steps": 1,
    "training.evaluate_samples": 2,
    "batch.global_size": 2,
    "data.prefetch": 1,
    "schedule.warmup_steps": 1,
}


def _fuzz(folder: Path, count: int, seed: int, prepare: Callable[[Path, random.Random], str]) -> Counter[str]:
    endings: Counter[str] = Counter()
    failures = []
    for case in range(count):
        sandbox = folder / "sandbox"
        mutation = prepare(sandbox, random.Random(f"{seed} {case}"))
        before = _listing(folder, _run_folder(sandbox))
        code, output = _start(sandbox, trains=case % TRAINED == 0 or mutation.startswith("json"))
        changed = {path for path in before ^ _listing(folder, _run_folder(sandbox)) if not path[0].endswith(".rows")}
        fault = _fault(code, output, changed)
        if fault:
            failures.append(f"case {case} of seed {seed} {fault}: {mutation}\n{output}")
            print(failures[-1], file=sys.stderr, flush=True)
        endings["sound" if code == 0 else "refused" if code == 2 else "failed"] += 1
        shutil.rmtree(sandbox)
        if case % 50 == 49:
            print(f"{case + 1} of {count}: {dict(endings)}", file=sys.stderr, flush=True)
    assert not failures, f"{len(failures)} failures, the first: {failures[0]}"
    return endings


def _fault(code: int | None, output: str, changed: set[tuple[str, int, int]]) -> str:
    if code is None:
        return "hangs"
    if code not in (0, 2) or "Traceback" in output:
        return f"ended with {code}"
    if code == 2 and "error: " not in output:
        return "gave no sentence"
    return f"wrote {changed}" if changed else ""


def _start(sandbox: Path, trains: bool = True) -> tuple[int | None, str]:
    """Exit code (None for a hang) and output of a run in `sandbox`, in a process forked from this one."""
    child = multiprocessing.get_context("fork").Process(target=_train, args=(sandbox, trains))
    child.start()
    child.join(TIMEOUT_SECONDS)
    deadline = time.monotonic() + MERCY
    while child.is_alive() and time.monotonic() < deadline:
        os.kill(child.pid, signal.SIGTERM)  # type: ignore[arg-type]
        child.join(1)
    code = child.exitcode
    child.kill()
    child.join()
    return code, (sandbox.parent / "run.log").read_text(errors="replace")


def _train(sandbox: Path, trains: bool) -> None:
    os.chdir(sandbox)
    speak_to(Path("../run.log"))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)

    if not trains:
        setup.build_engine = lambda *_: os._exit(0)  # type: ignore[assignment]

    def main() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until it trains, and saves when it is asked to stop
        pretrain(load_config("run.yaml"), Launch())
        os._exit(0)

    run_command(main, immediate_exit=True)


def _make_fresh(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_text(folder, documents=30)
    save_tokenizer(folder / "tokenizer.json")


def _run_folder(sandbox: Path) -> Path:
    with contextlib.suppress(Exception):  # what is wrong with it the run itself has to say
        return (sandbox / load_config(sandbox / "run.yaml").folder()).resolve()
    return sandbox / "run"


def _listing(folder: Path, run: Path) -> set[tuple[str, int, int]]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.log")
    outside = (path for path in files if run not in path.resolve().parents)
    return {(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in outside}


def _mutate_tree(tree: Any, chance: random.Random) -> None:
    """One change somewhere: another value, a key gone, a key misspelt, two values swapped."""
    places = _places(tree)
    parent, key = chance.choice(places)
    kind = chance.choice(["value", "value", "value", "near", "delete", "misspell", "swap"])
    if kind == "value":
        parent[key] = copy.deepcopy(chance.choice(VALUES))
    elif kind == "near" and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
        parent[key] = chance.choice(
            [-parent[key], parent[key] * 2, parent[key] + 1, parent[key] / 3, parent[key] * 1000]
        )
    elif kind == "delete":
        del parent[key]
    elif kind == "misspell" and isinstance(parent, dict):
        parent[str(key)[:-1] + chance.choice("xyz")] = parent.pop(key)
    else:
        other, name = chance.choice(places)
        parent[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(parent[key])


def _places(tree: Any) -> list[tuple[Any, Any]]:
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    below = [place for _, value in items if isinstance(value, (dict, list)) for place in _places(value)]
    return [*((tree, key) for key, _ in items), *below]


def _mutate_bytes(content: bytes, chance: random.Random) -> bytes:
    at, length = chance.randrange(len(content) + 1), chance.choice([1, 1, 8, 100])
    kind = chance.choice(["flip", "flip", "cut", "grow", "zero", "random", "remove", "empty"])
    if kind == "cut":
        return content[:at]
    if kind == "empty":
        return b""
    if kind == "grow":
        return content + chance.randbytes(length)
    if kind == "remove":
        return content[:at] + content[at + length :]
    part = content[at : at + length]
    new = {"flip": bytes(byte ^ 1 << chance.randrange(8) for byte in part), "zero": bytes(len(part))}
    return content[:at] + new.get(kind, chance.randbytes(len(part))) + content[at + length :]


def _mutate_json(file: Path, chance: random.Random) -> None:
    """Other content that is JSON all the same, and signed as ours is."""
    tree = json.loads(file.read_text())
    _mutate_tree(tree, chance)
    if file.name == "checkpoint.json" and isinstance(tree, dict):
        tree.pop("sha256", None)
        tree["sha256"] = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["configs", "files"])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    fuzz = {"configs": fuzz_configs, "files": fuzz_files}[arguments.what]
    with tempfile.TemporaryDirectory() as folder:
        print(dict(fuzz(Path(folder) / "fuzz", arguments.count, arguments.seed)))


if __name__ == "__main__":
    main()
