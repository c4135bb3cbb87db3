"""Lets tests import what the commands in `tools/` are made of, as those commands do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
