"""Downloads the wheels that a GPU machine without a network needs beside torch, Triton and transformers.

python tools/gpu_wheels.py [--output gpu-wheels] [--python 3.12]

Copy the folder there with the checkout; `make test-gpu GPU_PYTHON=python3` and `make gpu-report GPU_PYTHON=python3` add
its wheels to that interpreter's path, install nothing into it, and do not replace its torch. Versions are those
installed here; --bare leaves out the benchmarks' third-party kernels, whose versions are the newest.
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

REQUIRED = (
    *("hjson", "annotated-types", "pydantic", "pydantic-core", "typing-inspection"),
    *("orjson", "zstandard", "fastokens"),
)
# Published as source only; pure Python, since its kernels are compiled on use
SOURCE_PACKAGE = "deepspeed"
KERNEL_PACKAGES = ("liger-kernel", "cut-cross-entropy")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MAX_MIB = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-wheels"), help="default: gpu-wheels")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="Python of the GPU machine (default: 3.12)")
    parser.add_argument("--bare", action="store_true", help="without other people's kernels")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for wheel in arguments.output.glob("*.whl"):
        wheel.unlink()
    kernel_packages = () if arguments.bare else KERNEL_PACKAGES
    for command in pip_commands(arguments.output, arguments.python, kernel_packages):
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        if subprocess.run([sys.executable, "-m", "pip", *command], env=environment).returncode:
            raise UserError(f"pip must fetch the wheels, but failed at `pip {' '.join(command)}`.")
    print(check_wheels(arguments.output))


def pip_commands(output: Path, python: str, kernel_packages: Sequence[str]) -> list[list[str]]:
    """Arguments of the calls of pip; UserError if a package, whose version is to be pinned, is not installed here."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    options = ["--quiet", "--no-deps"]
    try:
        source_package, *packages = (f"{name}=={version(name)}" for name in (SOURCE_PACKAGE, *REQUIRED))
    except PackageNotFoundError as error:
        raise UserError(f"{error.name} must be installed here, but is not; run `make install`.") from None
    return [
        ["download", *options, *target, "--dest", str(output), *packages, *kernel_packages],
        ["wheel", *options, "--no-build-isolation", "--wheel-dir", str(output), source_package],
    ]


def check_wheels(output: Path) -> str:
    """Returns a summary of the wheels; UserError if they are too large."""
    wheels = list(output.glob("*.whl"))
    mib = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    if mib > MAX_MIB:
        raise UserError(f"{output} must hold at most {MAX_MIB} MiB, but holds {mib:.0f}; leave some out by --bare.")
    return f"{output}: {len(wheels)} wheels, {mib:.1f} MiB"


if __name__ == "__main__":
    run_command(main)
