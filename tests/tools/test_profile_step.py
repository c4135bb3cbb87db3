"""The profiler's command writes a trace that a browser can open, and names what was done."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from support.commands import ROOT, call, config_file


def test_writes_a_trace_of_the_steps_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "traces/trace.json.gz"
    tool = [sys.executable, str(ROOT / "tools/profile_step.py"), "--config", config_file(tmp_path)]
    done = call(*tool, "--steps", "2", "--output", str(trace))
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert {"step 1", "step 2"} <= set(names)
    assert "step 3" not in names
    assert "aten::addmm" in done.stdout
