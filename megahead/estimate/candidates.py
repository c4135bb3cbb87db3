"""How many rows of the vocabulary the softmax of a run scores."""

from __future__ import annotations

from megahead.config import RunConfig


def expected_candidates(targets: int, vocab_size: int) -> int:
    """Unique ids among `targets` tokens of text: 4,300 x (targets / 16,384)^0.62, fitted to English Wikipedia with a
    vocabulary of 50,000 (measured 4.3k, 10.9k, 22k for 16k, 65k, 262k targets)."""
    of_text: float = 4300 * float(targets / 16384) ** 0.62
    return min(targets, vocab_size, round(of_text))


def candidate_rows(config: RunConfig) -> int:
    """Candidate rows in the softmax of one micro-batch."""
    if config.objective.name == "vanilla":
        return config.model.padded_vocab_size()
    return expected_candidates(config.batch.micro_size * config.targets_per_row(), config.model.vocab_size)
