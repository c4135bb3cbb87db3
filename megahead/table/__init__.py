"""An embedding table beside the model: each row has an owner among the ranks, and a step sends and updates only rows
that it uses.

*Owner* of row i: rank i mod R. *Fetched* rows: those that a step uses, sent by their owners before it. *Stale* rows:
not updated by the last steps, as no batch used them; brought up to date when they are fetched. *Ballast*: a parameter
that makes DeepSpeed count the rows' gradients in the gradient norm (`table.py`).
"""

from megahead.table.owned import OwnedRows
from megahead.table.plan import RowPlan, plan_rows
from megahead.table.table import BALLAST, RowTable, SplitRowTable

__all__ = ["BALLAST", "OwnedRows", "RowPlan", "RowTable", "SplitRowTable", "plan_rows"]
