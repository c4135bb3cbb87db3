"""An embedding table beside the model: rows lie with their owners, and only those that are used are sent and moved."""

from megahead.table.owned import OwnedRows
from megahead.table.plan import RowPlan, plan_rows
from megahead.table.table import BALLAST, RowTable, SplitRowTable

__all__ = ["BALLAST", "OwnedRows", "RowPlan", "RowTable", "SplitRowTable", "plan_rows"]
