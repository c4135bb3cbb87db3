"""Whole training steps to be timed or traced, without an engine: what several benchmarks share."""
