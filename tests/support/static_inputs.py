"""The training command with the static inputs of graphs but without graphs: kernels are launched one by one."""

from __future__ import annotations

import runpy
from pathlib import Path

from megahead.engine import engine, graphs

if __name__ == "__main__":
    engine.build_capture = lambda device: graphs.without_capture
    runpy.run_path(str(Path(__file__).parents[2] / "launch/pretrain.py"), run_name="__main__")
