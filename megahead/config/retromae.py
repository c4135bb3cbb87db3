"""Objectives by which an encoder's [CLS] learns to represent a text: a decoder reconstructs it, of which the encoder
reads all (RetroMAE) or a part (TSDAE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from megahead.config.auxiliary import AuxiliarySettings, Curve
from megahead.config.base import refuse, require
from megahead.config.model import ModelConfig

if TYPE_CHECKING:
    from megahead.config.run import RunConfig


class TextDecoderConfig(AuxiliarySettings):
    """Base of the settings of objectives with a decoder of one layer, `EnhancedDecoder`."""

    weight: float = Field(default=1.0, gt=0)
    """Weight of the decoder's loss, a mean over all tokens but special ones; that of masked tokens has 1."""

    metric_prefix: ClassVar = "decoder"
    rest_label: ClassVar = "encoder"
    num_layers: ClassVar = 1
    curves: ClassVar[tuple[Curve, ...]] = (
        Curve("encoder_loss", "Encoder's loss", "of masked tokens, where a decoder reads [CLS]"),
        Curve("decoder_loss", "Decoder's loss", "of all tokens, from [CLS] and some others"),
    )

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError unless the run masks tokens that can be put back, from its first step to its last."""
        masking, model, section = config.masking, config.model, f"objective.{config.objective.auxiliary_name()}"
        rule = "be left out where next tokens are learned: [CLS] comes first and reads no text there"
        require(masking is not None and not model.is_causal, section, rule, got="given")
        assert masking is not None
        rule = f"be divisible by model.num_heads ({model.num_heads}) with {section}, whose decoder has as many"
        require(model.hidden_size % model.num_heads == 0, "model.hidden_size", rule, got=model.hidden_size)
        why = f"with {section}, whose decoder reads the text and learns from the first step to the last"
        refuse("objective.schedule", config.objective.schedule and "given", why)
        refuse("masking.diffusion", masking.diffusion, why)
        refuse("masking.noise_share", masking.noise_share, why)

    def targets_per_row(self, sequence_length: int) -> int:
        """All tokens between [CLS] and [SEP]."""
        return sequence_length - 2

    def head_parameters(self, model: ModelConfig) -> int:
        """Parameters of the decoder: 4 D^2 + 2 D F + F + 13 D, and D for each position."""
        hidden, mlp = model.hidden_size, model.mlp_size()
        return (4 * hidden + 2 * mlp + 13 + model.max_positions) * hidden + mlp

    def head_flops(self, model: ModelConfig, sequence_length: int) -> float:
        """FLOPs of the decoder per token: 3 * 2 (4 D^2 + 2 D F), and 3 * 4 T D of attention."""
        hidden, mlp = model.hidden_size, model.mlp_size()
        return 3 * 2 * hidden * (4 * hidden + 2 * mlp) + 3 * 4 * sequence_length * hidden


class RetroMAEConfig(TextDecoderConfig):
    """RetroMAE (arXiv 2205.12035): a decoder of one layer predicts each token of a row's first document from the hidden
    state of [CLS] and a few other tokens, by the run's objective. For retrieval."""

    decoder_rate: float = Field(default=0.5, gt=0, le=1)
    """Share of the tokens that the decoder does not see where it predicts a token, rounded to 256ths; each position has
    a mask of its own. The paper has 0.5, and a masking.rate of 0.3."""

    bag_weight: float = Field(default=0.0, ge=0)
    """Weight of DupMAE's second task (arXiv 2211.08769; the paper has 1): the largest scores over a row's tokens
    predict its set of tokens, by the run's objective. Its loss is a sum over the set, divided by the number of
    tokens."""

    implementation: ClassVar = "megahead.objectives.retromae:RetroMAE"
    curves: ClassVar = (
        *TextDecoderConfig.curves,
        Curve("decoder_bag", "Bag of words", "loss of a text's set of tokens, per token"),
    )

    @property
    def needs_all_outputs(self) -> bool:  # type: ignore[override]  # a class variable in the base class
        """Whether the hidden states of all tokens learn."""
        return self.pools_rows()

    def pools_rows(self) -> bool:
        """Whether there is a bag of words."""
        return self.bag_weight > 0

    def describe(self) -> str:
        """What the decoder does not see, and the weight of its loss."""
        masked = f"{self.decoder_rate:.0%} of its tokens masked"
        bag = f", and as sets of tokens from all outputs (weight {self.bag_weight:g})" if self.pools_rows() else ""
        return f"texts read back from [CLS] by a decoder with {masked} (weight {self.weight:g}){bag}"

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The decoder's loss per token, and that of the bag of words if there is one."""
        means = super().means(sums)
        of_decoder = means["loss"] - self.bag_weight / self.weight * means.get("bag", 0.0)
        return means | {"loss": of_decoder}

    def derived_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """The loss of masked tokens: the run's loss without the weighted losses of the decoder and the bag of words."""
        bag = self.bag_weight * means.get("decoder_bag", 0.0)
        return {"encoder_loss": super().derived_metrics(means)["encoder_loss"] - bag}

    def progress_text(self, means: Mapping[str, float]) -> str:
        """For example: encoder 6.1000  decoder 7.2431  bag 5.9000"""
        bag = f"  bag {means['decoder_bag']:.4f}" if "decoder_bag" in means else ""
        return f"{super().progress_text(means)}{bag}"


class TSDAEConfig(TextDecoderConfig):
    """TSDAE (arXiv 2104.06979): the encoder reads a part of a row's first document, and a decoder of one layer predicts
    each of its tokens from the hidden state of [CLS] and the tokens before it, by the run's objective. For vectors of
    sentences."""

    deletion_rate: float = Field(default=0.6, gt=0, lt=1)
    """Probability that a token of a row's first document is deleted. Special tokens and masked ones stay, so a low
    masking.rate is nearest to the paper."""

    implementation: ClassVar = "megahead.objectives.retromae:TSDAE"

    def describe(self) -> str:
        """What the encoder does not read, and the weight of the decoder's loss."""
        deleted = f"{self.deletion_rate:.0%} of the tokens deleted before"
        return f"texts read back from [CLS] by a decoder from left to right, {deleted} (weight {self.weight:g})"
