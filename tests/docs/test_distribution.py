"""What `make dist` builds has all that is shipped; what it says of itself to PyPI holds."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from megahead.version import __version__
from support.commands import ROOT
from support.installed import copied_sources, succeed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def shipped() -> set[str]:
    """The files of the package and of the configs, as they lie in an installation."""
    files = [
        *(ROOT / "megahead").rglob("*.py"),
        ROOT / "megahead/py.typed",
        *(ROOT / "megahead/report/template").iterdir(),
        *(ROOT / "configs").rglob("*.yaml"),
        *(ROOT / "configs").rglob("*.json"),
    ]
    return {str(path.relative_to(ROOT)).replace("configs/", "megahead/configs/", 1) for path in files}


@pytest.mark.slow
def test_the_sdist_and_the_wheel_that_is_made_of_it_have_all_that_is_shipped(tmp_path: Path) -> None:
    source, built = copied_sources(tmp_path), tmp_path / "dist"
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source))
    name = f"megahead-{__version__}"
    with tarfile.open(built / f"{name}.tar.gz") as archive:
        in_sdist = {member.name.removeprefix(f"{name}/") for member in archive if member.isfile()}
    sources = {path.replace("megahead/configs/", "configs/", 1) for path in shipped()}
    assert sources | {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= in_sdist
    with zipfile.ZipFile(built / f"{name}-py3-none-any.whl") as wheel:
        in_wheel = {path for path in wheel.namelist() if not path.startswith(f"{name}.dist-info/")}
        about = message_from_string(wheel.read(f"{name}.dist-info/METADATA").decode())
        assert wheel.read(f"{name}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert in_wheel == shipped()
    assert (about["License-Expression"], about["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload() == (ROOT / "README.md").read_text()


def test_make_dist_clears_what_was_built_before_and_git_ignores_it() -> None:
    done = subprocess.run(["make", "-n", "dist", "ARGS=--wheel"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["rm -rf dist", ".venv/bin/python -m build --wheel"]
    assert "/dist" in (ROOT / ".gitignore").read_text().splitlines()


def test_versions_are_one_and_classifiers_name_those_that_are_accepted() -> None:
    assert PROJECT["version"] == __version__
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert not [name for name in PROJECT["classifiers"] if name.startswith("License")]  # PEP 639: `license` says it
