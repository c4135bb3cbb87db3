"""Records all that the package computes and says, so that a change that must change nothing can show it.

PYTHONPATH=.:tests python tests/oracle/record.py BEFORE.json
PYTHONPATH=.:tests python tests/oracle/record.py AFTER.json --compare BEFORE.json

Tiny runs on one and two ranks (tests/oracle/cases.py): the SHA-256 of every tensor of every checkpoint, every logged
number but times, every file of their exports. Then the help of all commands, `--dry-run` of all configs, the generated
page of settings, their schema, and the public names. Both recordings must be of one machine: other processors round
otherwise. Uses public names and commands alone, so that it outlives any move of files.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors import safe_open

import megahead
import support.heavy_imports  # noqa: F401 - else every rank would import them
from megahead.__main__ import dispatch
from oracle.cases import CASES, HEADS, IDS, tree_of
from support.commands import free_port

ROOT = Path(__file__).parents[2]
UNEQUAL = ("second", "tokens_per", "stall", "wait", "mfu", "utilization", "memory", "bytes", "session", "source")
"""Parts of the names of values that differ from one call to the next: times, and checksums of what has a date."""

Recording = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--compare", type=Path, help="an earlier recording; differences are listed, and exit with 1")
    parser.add_argument("--only", nargs="*", help="some of the runs, and nothing else")
    arguments = parser.parse_args()
    output, before = arguments.output.resolve(), arguments.compare and json.loads(arguments.compare.read_text())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_text()
        found = recorded(arguments.only or list(CASES))
    if arguments.only is None:
        found |= {"help": helps(), "dry_run": dry_runs(), "settings": settings(), "names": sorted(megahead.__all__)}
    output.write_text(json.dumps(found, indent=1, sort_keys=True))
    changed = [] if before is None else list(differences(before, found))
    ended = {name: value for name, value in found.items() if name != "dry_run"}  # a config may refuse 1 or 8 ranks
    failed = [f"{place} failed" for place in failures(ended)]
    print("\n".join([*failed, *changed, f"{len(changed)} differences" if before else f"recorded in {output}"]))
    return int(bool(failed or changed))


def write_text() -> None:
    """A dataset of random walks on a sparse graph: each token has three likely successors; documents end with 0."""
    successors = np.random.default_rng(1234).integers(1, IDS, (IDS, 3))
    generator = np.random.default_rng(0)
    with megahead.IndexedDatasetWriter("text", vocab_size=IDS) as writer:
        for _ in range(200):
            tokens = [int(generator.integers(1, IDS))]
            while generator.random() > 0.02:
                tokens.append(int(successors[tokens[-1], generator.integers(3)]))
            writer.add_document([*tokens, 0])


def recorded(names: list[str]) -> Recording:
    """The runs of these names, by name and number of ranks, in the present folder."""
    found: Recording = {}
    for name in names:
        for ranks in CASES[name][1]:
            run = f"{name}-{ranks}"
            Path(f"{run}.yaml").write_text(yaml.safe_dump(tree_of(name, run)))
            problems = on_ranks(ranks, ["pretrain", "--config", f"{run}.yaml"])
            found[run] = problems or {"tensors": dict(tensors(Path(run))), "metrics": metrics(Path(run))}
            if ranks == 1 and not problems:
                found[run]["exports"] = {head: exported(run, head) for head in HEADS.get(name, ())}
            print(f"{run}: {'failed' if problems else len(found[run]['tensors'])}", flush=True)
    return found


def on_ranks(count: int, command: list[str]) -> str | None:
    """Calls `megahead COMMAND` on forked ranks; what they print and exit with where one of them fails."""
    port = int(free_port())
    logs = [Path(f"rank-{rank}.log") for rank in range(count)]
    ranks = [fork(command, rank, count, port, log) for rank, log in enumerate(logs)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    return "\n".join(log.read_text()[-2000:] for log in logs) + f"\nexit {max(codes, key=abs)}" if any(codes) else None


def fork(command: list[str], rank: int, count: int, port: int, log: Path) -> int:
    """The process of one rank, as a launcher's environment describes it."""
    if (child := os.fork()) != 0:
        return child
    code = 1
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = file, file
        if count > 1:
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in environment.items()} | {"MASTER_ADDR": "127.0.0.1"})
        sys.argv = ["megahead", *command]
        try:
            code = dispatch() or 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        except BaseException:
            traceback.print_exc()
        file.flush()
    os._exit(code)


def tensors(run: Path) -> Iterator[tuple[str, str]]:
    """The checksum of each tensor of each checkpoint, by step and name."""
    for number, folder in enumerate(sorted(run.glob("checkpoints/step-*"))):
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    yield f"{number}/{name}", checksum(np.ascontiguousarray(file.get_tensor(name)).tobytes())


def metrics(run: Path) -> list[Any]:
    """The lines of the log, without times."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [timeless(line) for line in lines]


def timeless(value: Any) -> Any:
    """Without what the clock and the machine decide, and with checkpoints named by their steps alone."""
    if isinstance(value, dict):
        return {name: timeless(v) for name, v in value.items() if not any(part in name for part in UNEQUAL)}
    if isinstance(value, str):
        return re.sub(r"(step-\d{8})-[0-9a-f]{6}", r"\1", value)
    return [timeless(v) for v in value] if isinstance(value, list) else value


def exported(run: str, head: str) -> Any:
    """The files of an export: what is JSON as it reads, of others the checksum; its card and curves have times."""
    folder = Path(f"{run}-{head}")
    problems = on_ranks(1, ["convert", "to-hf", "--checkpoint", run, "--output", str(folder), "--head", head])
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".md", ".png"))
    return problems or {str(path.relative_to(folder)): content(path) for path in files}


def content(path: Path) -> Any:
    return timeless(json.loads(path.read_bytes())) if path.suffix == ".json" else checksum(path.read_bytes())


def helps() -> Recording:
    """What each command says of itself."""
    usage = said("--help")
    names = [line.split()[0] for line in usage.splitlines() if line.startswith("  ")]
    return {"megahead": usage} | {name: said(name, "--help") for name in names}


def dry_runs() -> Recording:
    """What each shipped config resolves to, on one rank and on eight."""
    configs = sorted((ROOT / "configs").glob("*.yaml"))
    return {
        f"{path.stem} on {ranks}": said("pretrain", "--config", str(path), "--dry-run", "--world-size", str(ranks))
        for path in configs
        for ranks in (1, 8)
    }


def said(*command: str) -> str:
    """What a command of a fresh interpreter prints, in the checkout."""
    done = subprocess.run(
        [sys.executable, "-m", "megahead", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
    )
    return f"{done.stdout}{done.stderr}exit {done.returncode}"


def settings() -> Recording:
    """The schema of all settings, and the page about them."""
    page = (ROOT / "docs/configuration.md").read_bytes()
    return {"schema": megahead.RunConfig.model_json_schema(), "page": checksum(page)}


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def failures(found: Any, place: str = "") -> Iterator[str]:
    """Where a run or a command did not exit with 0."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield from failures(value, f"{place}/{name}")
    elif isinstance(found, str) and re.search(r"exit -?[1-9]\d*$", found):
        yield place


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """A line for each value that is not as it was; what is missing as a whole is one line."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after}):
            if before.get(name) is None and after.get(name) is None:
                continue  # what is nothing may be left out
            if name not in after or name not in before:
                yield f"{place}/{name}: {'gone' if name in before else 'new'}"
            else:
                yield from differences(before[name], after[name], f"{place}/{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}/{number}")
    elif before != after:
        yield f"{place}: {str(before)[:200]} -> {str(after)[:200]}"


if __name__ == "__main__":
    sys.exit(main())
