"""What is learned: to pick one's target among the batch's, or among the whole vocabulary."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megahead.config.base import Settings


class ObjectiveConfig(Settings):
    """One softmax over candidate rows of the embedding table (headless) or over all of it (vanilla)."""

    name: Literal["headless", "vanilla"] = "headless"
    """`headless`: contrastive weight tying, candidates are the targets of a group; `vanilla`: the whole vocabulary."""

    tied: bool = False
    """vanilla only: the head is the input embedding itself, instead of a matrix of its own."""

    temperature: float = Field(default=1.0, gt=0)
    """Scores are divided by this; the paper uses 1."""

    def head(self) -> Literal["pmi", "tied", "trained"]:
        """The language-model head such a run has: training-free (headless), the embedding itself, or one of its own."""
        if self.name == "headless":
            return "pmi"
        return "tied" if self.tied else "trained"
