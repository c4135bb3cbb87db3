"""What benchmarks share: whole steps without an engine, to be timed or traced; forms of the loss; real rows; memory."""
