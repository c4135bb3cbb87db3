"""What it was measured on, found out without importing torch, which would take memory of the GPU."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime

from megahead.version import __version__

PACKAGES = (
    "torch",
    "triton",
    "deepspeed",
    "transformers",
    "liger-kernel",
    "cut-cross-entropy",
    "flash-attn",
    "flash-attn-4",
)


def described() -> dict[str, str]:
    """By name."""
    found = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "Python": platform.python_version()}
    found |= {"GPU": _said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")}
    found |= {"megahead": f"{__version__}, {_said('git', 'describe', '--always', '--dirty')}"}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
