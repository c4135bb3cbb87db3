"""What a run looks like from outside: its metrics as curves, tables and a page."""

from megahead.report.curves import draw_curves, save_curves
from megahead.report.metrics import RunMetrics, read_metrics
from megahead.report.rendering import render_page, save_page
from megahead.report.runs import Run, read_runs
from megahead.report.tables import to_json, to_markdown, to_rich

__all__ = [
    "Run",
    "RunMetrics",
    "draw_curves",
    "read_metrics",
    "read_runs",
    "render_page",
    "save_curves",
    "save_page",
    "to_json",
    "to_markdown",
    "to_rich",
]
