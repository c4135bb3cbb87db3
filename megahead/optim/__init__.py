"""How weights are updated: in which groups, by which optimizer, its rate over time, and rows that are updated when they
are used."""

from megahead.optim.build import build_optimizer
from megahead.optim.groups import parameter_groups, set_learning_rate
from megahead.optim.muon import MOMENTUM, Muon, scaled_orthogonal
from megahead.optim.row_rules import RULES, RowRule, Rows, build_row_rule
from megahead.optim.schedule import learning_rate_ratio

__all__ = [
    "MOMENTUM",
    "RULES",
    "Muon",
    "RowRule",
    "Rows",
    "build_optimizer",
    "build_row_rule",
    "learning_rate_ratio",
    "parameter_groups",
    "scaled_orthogonal",
    "set_learning_rate",
]
