"""How weights move: which of them decay, the optimizer, and its rate over time."""

from megahead.optim.adamw import build_adamw
from megahead.optim.groups import decay_groups
from megahead.optim.schedule import learning_rate_ratio

__all__ = ["build_adamw", "decay_groups", "learning_rate_ratio"]
