"""What a run looks like from outside: its metrics as curves and tables."""

from megahead.report.curves import draw_curves, save_curves
from megahead.report.metrics import RunMetrics, read_metrics
from megahead.report.tables import to_json, to_markdown, to_rich

__all__ = ["RunMetrics", "draw_curves", "read_metrics", "save_curves", "to_json", "to_markdown", "to_rich"]
