"""Fetches the wheels that a GPU machine without a network lacks beside torch, Triton and transformers.

tools/gpu_wheels.py [--output gpu-wheels] [--python 3.12]

Carry the folder there with the checkout; `make test-gpu GPU_PYTHON=python3` and `make gpu-report GPU_PYTHON=python3`
lay its wheels beside what that interpreter has, install nothing into it, and leave its torch alone. Versions are those
that are installed here; --bare leaves out the kernels of others that ours is compared with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megahead.errors import UserError, run_command

NEEDED = (
    *("hjson", "annotated-types", "pydantic", "pydantic-core", "typing-inspection"),
    *("orjson", "zstandard", "fastokens"),
)
# Published as source only; of Python alone, as its kernels are compiled when they are used, and here none is
BUILT_HERE = "deepspeed"
COMPARED = ("liger-kernel", "cut-cross-entropy")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_MIB = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-wheels"), help="default: gpu-wheels")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="Python of the GPU machine (default: 3.12)")
    parser.add_argument("--bare", action="store_true", help="without other people's kernels")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for old in arguments.output.glob("*.whl"):
        old.unlink()
    others = () if arguments.bare else COMPARED
    for command in commands(arguments.output, arguments.python, others):
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        if subprocess.run([sys.executable, "-m", "pip", *command], env=environment).returncode:
            raise UserError(f"pip must fetch the wheels, but failed at `pip {' '.join(command)}`.")
    print(checked(arguments.output, arguments.python, len(NEEDED) + 1 + len(others)))


def commands(output: Path, python: str, others: Sequence[str]) -> list[list[str]]:
    """What pip is called with; UserError where something is not installed here, whose version there should be."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    into = ["--quiet", "--no-deps"]
    try:
        built, wanted = pinned(BUILT_HERE), [*map(pinned, NEEDED), *others]
    except PackageNotFoundError as error:
        raise UserError(f"{error.name} must be installed here, but is not; run `make install`.") from None
    return [
        ["download", *into, *target, "--dest", str(output), *wanted],
        ["wheel", *into, "--no-build-isolation", "--wheel-dir", str(output), built],
    ]


def pinned(name: str) -> str:
    return f"{name}=={version(name)}"


def checked(output: Path, python: str, count: int) -> str:
    """A line about the wheels; UserError unless there are so many, which fit the machine and are small enough."""
    wheels = sorted(output.glob("*.whl"))
    if len(wheels) != count:
        raise UserError(f"{output} must hold {count} wheels, but holds {len(wheels)}.")
    mebibytes = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    if mebibytes > MOST_MIB:
        raise UserError(
            f"{output} must hold at most {MOST_MIB} MiB, but holds {mebibytes:.0f}; leave some out by --bare."
        )
    for wheel in wheels:
        interpreter, binary, platform = wheel.stem.split("-")[-3:]
        fits = binary in ("none", "abi3") or f"cp{python.replace('.', '')}" in interpreter.split(".")
        if not (fits and (platform == "any" or "x86_64" in platform)):
            raise UserError(f"{wheel} must fit Python {python} on Linux (x86-64), but does not.")
    return f"{output}: {count} wheels, {mebibytes:.1f} MiB"


if __name__ == "__main__":
    run_command(main)
