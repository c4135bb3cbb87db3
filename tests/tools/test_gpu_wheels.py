"""Wheels for a machine without a network: what pip is asked for, and what it must have brought."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from gpu_wheels import MAX_MIB, REQUIRED, check_wheels, pip_commands

from megahead.errors import UserError


def test_pip_is_asked_for_the_versions_that_are_tested_here_and_for_no_other_packages() -> None:
    download, build = pip_commands(Path("out"), "3.12", ["liger-kernel"])
    assert download[:3] == ["download", "--quiet", "--no-deps"]
    assert "--only-binary=:all:" in download
    assert download[download.index("--python-version") + 1] == "3.12"
    wanted = [f"{name}=={version(name)}" for name in REQUIRED]
    assert download[-len(wanted) - 3 :] == ["--dest", "out", *wanted, "liger-kernel"]
    assert build[0] == "wheel"
    assert "--no-deps" in build  # else torch would come along
    assert build[-3:] == ["--wheel-dir", "out", f"deepspeed=={version('deepspeed')}"]


def wheels(folder: Path, *names: str, size: int = 10) -> Path:
    for name in names:
        with (folder / f"{name}.whl").open("wb") as file:
            file.truncate(size)
    return folder


BINARY = "orjson-3.13.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64"
STABLE = "fastokens-0.3.5-cp39-abi3-manylinux_2_17_x86_64"


def test_wheels_that_fit_are_told_with_their_size(tmp_path: Path) -> None:
    wheels(tmp_path, BINARY, STABLE, "hjson-3.1.0-py3-none-any", size=2**20)
    assert check_wheels(tmp_path, "3.12", 3) == f"{tmp_path}: 3 wheels, 3.0 MiB"


@pytest.mark.parametrize(
    ("names", "count", "size", "sentence"),
    [
        ([STABLE], 2, 10, "must hold 2 wheels, but holds 1."),
        ([BINARY.replace("312", "311")], 1, 10, "must fit Python 3.12 on Linux (x86-64), but does not."),
        ([BINARY.replace("x86_64", "aarch64")], 1, 10, "must fit Python 3.12 on Linux (x86-64), but does not."),
        ([BINARY], 1, (MAX_MIB + 1) * 2**20, "must hold at most 32 MiB, but holds 33; leave some out by --bare."),
    ],
)
def test_wheels_that_are_of_no_use_there_are_refused(
    tmp_path: Path, names: list[str], count: int, size: int, sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_wheels(wheels(tmp_path, *names, size=size), "3.12", count)
    assert str(refused.value).endswith(sentence)
