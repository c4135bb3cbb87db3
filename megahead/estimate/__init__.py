"""What a model costs, from its config alone: parameters, floating-point operations, memory. Imports no torch."""

from megahead.estimate.candidates import candidate_rows, expected_candidates
from megahead.estimate.flops import FlopsPerToken, run_flops, training_flops
from megahead.estimate.memory import (
    RankMemory,
    rank_memory,
    rank_parameters,
    ways_to_need_less,
)
from megahead.estimate.parameters import ParameterCounts, count_parameters, run_parameters
from megahead.estimate.peaks import peak_flops
from megahead.estimate.shorter_rows import ShorterLayers

__all__ = [
    "FlopsPerToken",
    "ParameterCounts",
    "RankMemory",
    "ShorterLayers",
    "candidate_rows",
    "count_parameters",
    "expected_candidates",
    "peak_flops",
    "rank_memory",
    "rank_parameters",
    "run_flops",
    "run_parameters",
    "training_flops",
    "ways_to_need_less",
]
