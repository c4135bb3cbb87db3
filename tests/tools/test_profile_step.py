"""The profiler's command writes a trace that a browser can open, and names what was done."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from support.commands import config_file
from support.forked import run_script


def test_writes_a_trace_of_the_steps_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "traces/trace.json.gz"
    tool = ("tools/profile_step.py", "--config", config_file(tmp_path))
    done = run_script(*tool, "--steps", 2, "--output", trace)
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert {"step 1", "step 2"} <= set(names)
    assert "step 3" not in names
    assert re.search(r"aten::(mm|addmm|bmm) ", done.stdout), done.stdout
