"""Shows runs: their metrics as curves (PNG), tables, and one HTML page.

*Record*: one line of a run's `metrics.jsonl`; *event*: what happened beside steps (resumed, rolled back, a bad step);
*panel*: one chart of the page, with a line for each run.

Drawing needs matplotlib, which is imported at the first use of a name, not with the package.
"""

from typing import TYPE_CHECKING

from megahead.on_first_use import on_first_use
from megahead.report.metrics import RunMetrics, read_all_metrics, read_metrics
from megahead.report.runs import Run, read_runs
from megahead.report.tables import to_json, to_markdown, to_rich

if TYPE_CHECKING:
    from megahead.report.curves import draw_curves, save_curves
    from megahead.report.geometry import add_geometry
    from megahead.report.rendering import render_page, save_page
    from megahead.report.similarity import save_similarities
    from megahead.report.task_curves import TaskPoint, logged_points, save_task_curves

__all__ = [
    "Run",
    "RunMetrics",
    "TaskPoint",
    "add_geometry",
    "draw_curves",
    "logged_points",
    "read_all_metrics",
    "read_metrics",
    "read_runs",
    "render_page",
    "save_curves",
    "save_page",
    "save_similarities",
    "save_task_curves",
    "to_json",
    "to_markdown",
    "to_rich",
]

__getattr__ = on_first_use(
    __name__,
    curves=("draw_curves", "save_curves"),
    geometry=("add_geometry",),
    rendering=("render_page", "save_page"),
    similarity=("save_similarities",),
    task_curves=("TaskPoint", "logged_points", "save_task_curves"),
)
