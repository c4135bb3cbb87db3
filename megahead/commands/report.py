"""Makes one self-contained HTML page of one or several runs: curves, events, samples, settings.

megahead report runs/headless runs/vanilla --output report.html

The page loads no other files. It includes texts of `megahead generate --model RUN --output RUN/samples.jsonl`, and
measurements of `--geometry`, also of earlier calls.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megahead.files import write_atomically
from megahead.run_folder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first run's folder")
    geometry = "first measure, on held-out text, how much of the loss's gradient passes each checkpoint's head, and "
    geometry += "how evenly its outputs and embedding fill their space"
    parser.add_argument("--geometry", action="store_true", help=geometry)
    arguments = parser.parse_args()
    if arguments.geometry:
        from megahead.evaluate.geometry import add_geometry

        for run in arguments.runs:
            add_geometry(RunFolder.of(run))
    from megahead.report.read import read_runs

    runs = read_runs(arguments.runs)  # reports errors before torch is imported
    from megahead.report.page import render_page

    output = arguments.output or RunFolder(arguments.runs[0]).report
    write_atomically(output, render_page(runs))
    print(f"wrote {output}")
