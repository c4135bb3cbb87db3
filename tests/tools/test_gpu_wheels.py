"""Wheels for a machine without a network: what pip is asked for, and how much it may have brought."""

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


def test_wheels_are_told_with_their_size_and_refused_if_they_are_too_large(tmp_path: Path) -> None:
    wheels(tmp_path, "orjson", "fastokens", "hjson", size=2**20)
    assert check_wheels(tmp_path) == f"{tmp_path}: 3 wheels, 3.0 MiB"
    with pytest.raises(UserError) as refused:
        check_wheels(wheels(tmp_path, "torch", size=(MAX_MIB - 2) * 2**20))
    assert str(refused.value).endswith("must hold at most 32 MiB, but holds 33; leave some out by --bare.")
