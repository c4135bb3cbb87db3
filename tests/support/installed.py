"""The package as users install it: a wheel of this checkout in a folder, and programs that see that folder alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.commands import ROOT

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input")


def copied_sources(folder: Path) -> Path:
    """What a package is built of, copied to `folder`/source: building leaves its traces beside pyproject.toml."""
    source = folder / "source"
    for part in ("megahead", "configs"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source)
    return source


def install(folder: Path) -> Path:
    """Builds a wheel, without network, and installs it in `folder`/site, which is returned."""
    source = copied_sources(folder)
    succeed(*PIP, "wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder / "wheels"))
    (wheel,) = (folder / "wheels").iterdir()
    succeed(*PIP, "install", str(wheel), "--no-deps", "--no-index", "--target", str(folder / "site"))
    return folder / "site"


def run_installed(site: Path, program: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in `cwd`. `-S`: no .pth file, by which an editable installation would lead to this checkout."""
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), *others]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-S", str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=300, check=False)


def succeed(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
