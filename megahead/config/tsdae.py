"""TSDAE: an encoder's [CLS] learns to represent a text of which many tokens are deleted, and a decoder continues it."""

from __future__ import annotations

from pydantic import Field

from megahead.config.retromae import TextDecoderConfig


class TSDAEConfig(TextDecoderConfig):
    """TSDAE (arXiv 2104.06979): the encoder reads a part of a row's first document, and a decoder of one layer predicts
    each of its tokens from the hidden state of [CLS] and the tokens before it, by the run's objective. For vectors of
    sentences."""

    deletion_rate: float = Field(default=0.6, gt=0, lt=1)
    """Probability that a token of a row's first document is deleted. Special tokens and masked ones stay, so a low
    masking.rate is nearest to the paper."""

    def implementation(self) -> str:
        """The class that computes it."""
        return "megahead.objectives.tsdae:TSDAE"

    def describe(self) -> str:
        """What the encoder does not read, and the weight of the decoder's loss."""
        deleted = f"{self.deletion_rate:.0%} of the tokens deleted before"
        return f"texts read back from [CLS] by a decoder from left to right, {deleted} (weight {self.weight:g})"
