"""Settings of the auxiliary objectives: multi-token prediction, phrases, replaced tokens, RetroMAE and TSDAE, and a
user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from megahead.config.auxiliary import AuxiliarySettings, Curve
from megahead.config.base import load_class, refuse, require, require_class_path
from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.token_subsets import TOKEN_SUBSET_FIELDS
from megahead.wording import pluralize

if TYPE_CHECKING:
    from megahead.config.run import RunConfig


class MultiTokenConfig(AuxiliarySettings):
    """Multi-token prediction (arXiv 2404.19737): parallel heads of one block each read the body's final hidden states
    and predict tokens further ahead, by the run's objective."""

    heads: int = Field(default=1, ge=1)
    """Further heads: head k predicts the token k + 1 ahead. The paper's n is this + 1."""

    weight: float = Field(default=0.3, gt=0)
    """Weight of the heads' loss, a mean over all their tokens; that of next tokens has 1. 0.3 is DeepSeek-V3's (arXiv
    2412.19437)."""

    implementation: ClassVar = "megahead.objectives.multi_token:MultiToken"
    metric_prefix: ClassVar = "ahead"
    main_loss_label: ClassVar = "next"
    needs_all_outputs: ClassVar = True
    shares_candidates: ClassVar = True
    curves: ClassVar = (
        Curve("next_loss", "Loss of next tokens", "without that of tokens further ahead"),
        Curve("ahead_loss", "Loss of tokens further ahead", "a mean over the heads"),
    )

    @property
    def num_layers(self) -> int:  # type: ignore[override]  # a class variable in the base class
        """A block for each head."""
        return self.heads

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError unless a decoder is trained, on rows longer than the heads predict."""
        section, length = "objective.multi_token", config.data.sequence_length
        rule = "be left out of an encoder: heads read earlier tokens alone"
        require(not config.model.is_encoder(), section, rule, got="given")
        why = f"with {section}, whose heads learn from the first step to the last"
        refuse("objective.schedule", config.objective.schedule and "given", why)
        require(self.heads < length, f"{section}.heads", f"be below data.sequence_length ({length})", got=self.heads)

    def targets_per_row(self, sequence_length: int) -> int:
        """All tokens of the row for each head: outputs are also computed where the document has no target that far
        ahead."""
        return self.heads * sequence_length

    def head_blocks(self, model: ModelConfig) -> ModelConfig:
        """A block for each head, and a norm that they share."""
        return model.model_copy(update={"num_layers": self.heads})

    def describe(self) -> str:
        """The number of heads, and the weight of their loss."""
        return f"tokens further ahead by {pluralize(self.heads, 'head')} (weight {self.weight:g})"

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The loss of all heads, and with several of them that of each."""
        means = {"loss": sums["loss"] / max(sums["count"], 1.0)}
        if self.heads > 1:
            for k in range(1, self.heads + 1):
                means[f"loss_{k + 1}"] = sums[f"loss_{k + 1}"] / max(sums[f"count_{k + 1}"], 1.0)
        return means


def _require_masking(config: RunConfig, why: str) -> MaskingConfig:
    """The masking of a run with an objective that needs masked tokens; ConfigError with the reason `why` if next tokens
    are learned."""
    section, masks = f"objective.{config.objective.auxiliary_name()}", not config.model.is_causal
    rule = f"be left out where next tokens are learned: {why}"
    require(config.masking is not None and masks, section, rule, got="given")
    assert config.masking is not None
    return config.masking


class PhrasesConfig(AuxiliarySettings):
    """Phrases that several rows share are masked, and the outputs at both ends are trained to match those of the same
    phrase in other rows (NPM, arXiv 2212.01349), beside the loss of masked tokens."""

    weight: float = Field(default=1.0, gt=0)
    """Weight of the loss at each end of a masked phrase, relative to that of a masked token."""

    shortest: int = Field(default=2, ge=2)
    """Fewest tokens of a phrase."""

    longest: int = Field(default=10, ge=2)
    """Most tokens of a phrase; the paper has 10. With fixed counts at most a row's targets."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """Probability mass of phrases in the selection of a row's masked tokens; masking.strategy selects the rest."""

    group_samples: int = Field(default=32, ge=2)
    """Consecutive samples searched for shared phrases, a divisor of batch.micro_size. More find more phrases, and
    negatives."""

    temperature: float | None = Field(default=None, gt=0)
    """Divides products of outputs; by default the square root of model.hidden_size (the paper)."""

    @model_validator(mode="after")
    def _check_lengths(self) -> PhrasesConfig:
        rule = f"be at least shortest ({self.shortest})"
        require(self.longest >= self.shortest, "longest", rule, got=self.longest)
        return self

    implementation: ClassVar = "megahead.objectives.phrases:Phrases"
    metric_prefix: ClassVar = "phrase"
    needs_all_outputs: ClassVar = True
    skews_targets: ClassVar = True
    curves: ClassVar = (
        Curve("phrase_loss", "Phrase loss", "at the ends of masked phrases"),
        Curve("phrase_found", "Masked phrases found", "share of their ends", percent=True, from_zero=True),
    )

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError unless the run masks tokens and each micro-batch has whole groups."""
        micro_size, section = config.batch.micro_size, "objective.phrases"
        why = "with phrases, which the model itself learns from the first step to the last"
        refuse("objective.schedule", config.objective.schedule and "given", why)
        masking = _require_masking(config, "phrases are masked in an encoder's rows")
        refuse("masking.diffusion", masking.diffusion, f"with {section}, which are masked whole")
        longest = masking.max_unit_length(config.data.sequence_length, self.longest)
        rule, hint = f"be at most a row's number of targets ({longest})", "raise masking.rate"
        require(self.shortest <= longest, f"{section}.shortest", rule, got=self.shortest, hint=hint)
        divides = micro_size % self.group_samples == 0
        require(divides, f"{section}.group_samples", f"divide batch.micro_size ({micro_size})", got=self.group_samples)

    def describe(self) -> str:
        """The phrases' lengths, the rows of a group, and the weight of the loss."""
        lengths, rows = f"{self.shortest} to {self.longest} tokens", pluralize(self.group_samples, "row")
        return f"phrases of {lengths} found among {rows} by outputs of all tokens (weight {self.weight:g})"

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The loss per phrase end, the share of ends that are found, and the number of ends."""
        ends = max(sums["ends"], 1)
        return {"loss": sums["loss"] / ends, "found": sums["found"] / ends, "ends": sums["ends"]}

    def evaluation_text(self, means: Mapping[str, float]) -> str:
        """For example: phrases 3.1000, found 12.0%"""
        return f"phrases {means['loss']:.4f}, found {means['found']:.1%}"


class ReplacedTokensConfig(AuxiliarySettings):
    """ELECTRA (arXiv 2003.10555): a generator learns the masked tokens by the run's objective, samples replace them,
    and the model learns which tokens were replaced."""

    generator_layers: int = Field(default=1, gt=0)
    """Blocks of the generator, as wide as the model's (as in COCO-LM, arXiv 2102.08473); it shares the model's
    embedding."""

    draws: Literal["group", "vocabulary"] = "group"
    """headless: what replacements are sampled from. `group`: the candidates of the group, at almost no cost;
    `vocabulary`: all ids, by a product with the whole embedding."""

    weight: float = Field(default=50.0, gt=0)
    """Weight of the detection's loss, a mean over all tokens but special ones; the generator's has 1."""

    implementation: ClassVar = "megahead.objectives.replaced_tokens:ReplacedTokens"
    metric_prefix: ClassVar = "detection"
    main_loss_label: ClassVar = "generator"
    samples_tokens: ClassVar = True
    perplexity_prefix: ClassVar = "generator's "  # before "perplexity" in messages
    no_head_reason: ClassVar = "detects replaced tokens and predicts no tokens"
    dense_embedding_reason: ClassVar = (  # in the banner; in the error, after "`engine.embedding` must"
        "replaced tokens are drawn",
        "be `dense` with objective.replaced_tokens, whose held-out tokens are drawn from all ids at once",
    )
    curves: ClassVar = (
        Curve("generator_loss", "Generator's loss", "of masked tokens, where some are replaced"),
        Curve("detection_loss", "Detection loss", "of whether a token was replaced", from_zero=True),
        Curve("detection_found", "Replaced tokens found", "share of them", percent=True, from_zero=True),
    )

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError without masked tokens for the generator, or with a setting that excludes it."""
        objective, num_layers, section = config.objective, config.model.num_layers, "objective.replaced_tokens"
        masking = _require_masking(config, "those that are replaced are an encoder's masked tokens")
        rule = f"be at most model.num_layers ({num_layers})"
        require(self.generator_layers <= num_layers, f"{section}.generator_layers", rule, got=self.generator_layers)
        if objective.name == "vanilla":
            rule = "be left out of a vanilla objective, whose tokens are always drawn from all ids"
            require(self.draws == "group", f"{section}.draws", rule, got=self.draws)
        refuse("masking.diffusion", masking.diffusion, f"with {section}, whose model predicts no tokens")
        why = f"with {section}, whose model reads all tokens, and no mask tokens"
        for field, value in masking.changed(*TOKEN_SUBSET_FIELDS).items():
            refuse(f"masking.{field}", value, why)
        why = f"with {section}, whose model finds all tokens that are not the text's"
        refuse("masking.noise_share", masking.noise_share, why)
        why = f"with {section}, by which generator and model learn side by side"
        refuse("objective.schedule", objective.schedule and "given", why)
        why = f"with {section}, whose generator has one head"
        refuse("objective.vanilla_weight", objective.vanilla_weight, why)
        why = f"with {section}, whose model reads the candidates' rows as inputs"
        refuse("objective.candidates", objective.candidates == "own" and "own", why)
        why = f"with {section}, whose generator is in no such folder"
        refuse("init.from_hf", config.init and config.init.from_hf, why)
        why = f"with {section}, where held-out loss is the generator's and not the model's"
        refuse("training.keep_best", config.training.keep_best, why)

    def generator_config(self, model: ModelConfig) -> ModelConfig:
        """The model with `generator_layers` layers."""
        return model.model_copy(update={"num_layers": self.generator_layers})

    def samples_vocabulary(self) -> bool:
        return self.draws == "vocabulary"

    def head_parameters(self, model: ModelConfig) -> int:
        """Parameters of the detection head: D^2 + 2 D + 1."""
        return (model.hidden_size + 2) * model.hidden_size + 1

    def head_flops(self, model: ModelConfig, sequence_length: int) -> float:
        """FLOPs of the detection head's transform and score per token: 3 * 2 (D^2 + D)."""
        return 3 * 2 * (model.hidden_size**2 + model.hidden_size)

    def describe(self) -> str:
        """The generator's layers, the candidates for replacements, and the weight of the detection loss."""
        layers = pluralize(self.generator_layers, "layer")
        candidates = ", drawn from all ids" if self.samples_vocabulary() else ""
        return f"learned by a generator of {layers}{candidates}, whose tokens the model finds (weight {self.weight:g})"

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Detection loss per classified token, share of replaced tokens, and the recall of replaced tokens (`found`)
        and original tokens (`kept`), 0 without such tokens."""
        classified, replaced = sums["classified"], sums["replaced"]
        return {
            "loss": sums["loss"] / max(classified, 1),
            "replaced": replaced / max(classified, 1),
            "found": sums["found"] / max(replaced, 1),
            "kept": sums["kept"] / max(classified - replaced, 1),
        }

    def evaluation_text(self, means: Mapping[str, float]) -> str:
        """For example: detection 0.2431, found 48.2% and kept 98.1%"""
        return f"detection {means['loss']:.4f}, found {means['found']:.1%} and kept {means['kept']:.1%}"

    def export_text(self, means: Mapping[str, float]) -> str:
        """For example: 48.2% of replaced tokens found and 98.1% of others kept"""
        return f"{means['found']:.1%} of replaced tokens found and {means['kept']:.1%} of others kept"


class TextDecoderConfig(AuxiliarySettings):
    """Base of the settings of objectives with a decoder of one layer, `EnhancedDecoder`."""

    weight: float = Field(default=1.0, gt=0)
    """Weight of the decoder's loss, a mean over all tokens but special ones; that of masked tokens has 1."""

    metric_prefix: ClassVar = "decoder"
    main_loss_label: ClassVar = "encoder"
    num_layers: ClassVar = 1
    curves: ClassVar[tuple[Curve, ...]] = (
        Curve("encoder_loss", "Encoder's loss", "of masked tokens, where a decoder reads [CLS]"),
        Curve("decoder_loss", "Decoder's loss", "of all tokens, from [CLS] and some others"),
    )

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError unless all steps mask tokens, and the original text can be restored for the decoder."""
        model, section = config.model, f"objective.{config.objective.auxiliary_name()}"
        masking = _require_masking(config, "[CLS] comes first and reads no text there")
        rule = f"be divisible by model.num_heads ({model.num_heads}) with {section}, whose decoder has as many"
        require(model.hidden_size % model.num_heads == 0, "model.hidden_size", rule, got=model.hidden_size)
        why = f"with {section}, whose decoder reads the text and learns from the first step to the last"
        refuse("objective.schedule", config.objective.schedule and "given", why)
        refuse("masking.diffusion", masking.diffusion, why)
        refuse("masking.noise_share", masking.noise_share, why)
        # layers after the model's, which alone see mask tokens
        why = f"with {section}, whose decoder would read [CLS] after these layers, which are not exported"
        refuse("masking.mask_decoder_layers", masking.mask_decoder_layers, why)

    def targets_per_row(self, sequence_length: int) -> int:
        """All tokens between [CLS] and [SEP]."""
        return sequence_length - 2

    def head_parameters(self, model: ModelConfig) -> int:
        """Parameters of the decoder: 4 D^2 + 2 D F + F + 13 D, and D per position (MLP width F)."""
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
        """Whether all tokens' hidden states are trained."""
        return self.has_bag_of_words()

    def has_bag_of_words(self) -> bool:
        """Whether there is a bag of words."""
        return self.bag_weight > 0

    def describe(self) -> str:
        """What the decoder does not see, and the weight of its loss."""
        masked = f"{self.decoder_rate:.0%} of its tokens masked"
        bag = (
            f", and as sets of tokens from all outputs (weight {self.bag_weight:g})" if self.has_bag_of_words() else ""
        )
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


class CustomConfig(AuxiliarySettings):
    """An auxiliary objective of your own (docs/extending.md)."""

    objective: str
    """`path/to/file.py:Class` or `package.module:Class`, a subclass of megahead.objectives.auxiliary.Auxiliary."""

    weight: float = Field(default=1.0, gt=0)
    """Weight of its loss; the softmax's has 1."""

    settings: dict[str, Any] = Field(default={})
    """Settings for the class, which reads them from `config.objective.custom.settings`."""

    curves: ClassVar = (Curve("auxiliary_loss", "Auxiliary loss", "of an objective of one's own"),)

    @field_validator("objective")
    @classmethod
    def _check_class_path(cls, value: str) -> str:
        return require_class_path("objective", value)

    @property
    def implementation(self) -> str:  # type: ignore[override]  # a class variable in the base class
        """The class that `objective` names."""
        return self.objective

    def evaluation_text(self, means: Mapping[str, float]) -> str:
        """For example: auxiliary 4.2310, right 0.3121"""
        others = [f"{name} {mean:.4f}" for name, mean in means.items() if name != "loss"]
        return ", ".join([super().evaluation_text(means), *others])

    @property
    def needs_all_outputs(self) -> bool:  # type: ignore[override]  # a class variable in the base class
        """The class's own `needs_all_outputs`. Imports the class, and with it torch."""
        return bool(getattr(self._load_class(), "needs_all_outputs", False))

    def head_parameters(self, model: ModelConfig) -> int:
        """The class's own `head_parameters(model)`. Imports the class, and with it torch."""
        return int(getattr(self._load_class(), "head_parameters", lambda _: 0)(model))  # 0 if it is no Auxiliary at all

    def _load_class(self) -> Any:
        return load_class("objective.custom.objective", self.objective)
