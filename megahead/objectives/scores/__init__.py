"""How an output is compared with a candidate's row: each a file, and a line here.

A score is a product of what it makes of the output and of the row, through a link where it is no product itself. So all
of them take the same three products, on one rank or with candidates split over ranks.
"""

from collections.abc import Mapping

from megahead.objectives.scores.cosine import Cosine
from megahead.objectives.scores.dot import Dot
from megahead.objectives.scores.harmonic import Harmonic
from megahead.objectives.scores.score import DividesOutputs, Score

SCORES: Mapping[str, type[Score]] = {"dot": Dot, "cosine": Cosine, "harmonic": Harmonic}
"""By `objective.score`."""

__all__ = ["SCORES", "Cosine", "DividesOutputs", "Dot", "Harmonic", "Score"]
