"""What a model costs, from its config alone: parameters and floating-point operations. Imports no torch."""

from megahead.estimate.flops import FlopsPerToken, training_flops
from megahead.estimate.parameters import ParameterCounts, count_parameters

__all__ = ["FlopsPerToken", "ParameterCounts", "count_parameters", "training_flops"]
