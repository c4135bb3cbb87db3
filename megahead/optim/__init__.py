"""How weights move: which of them decay, the optimizer, its rate over time, and rows that move when they are used."""

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
