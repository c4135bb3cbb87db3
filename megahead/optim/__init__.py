"""How weights are updated: which of them decay, the optimizer, its schedule, and rules for the rows of a table, which
are updated only when they are used.

*Late row*: one that the last steps did not update, as no batch used it; to *catch up* is to apply what these steps
would have done to it (momentum and weight decay). *Touched*: the step of a row's last update.
"""

from megahead.optim.adamw import build_adamw
from megahead.optim.groups import decay_groups
from megahead.optim.row_rules import RULES, RowRule, Rows, build_row_rule
from megahead.optim.schedule import learning_rate_ratio

__all__ = [
    "RULES",
    "RowRule",
    "Rows",
    "build_adamw",
    "build_row_rule",
    "decay_groups",
    "learning_rate_ratio",
]
