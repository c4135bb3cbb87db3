"""What is masked: rows of encoders, masked inputs of decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import cos, pi
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from megahead.config.base import Settings, require_named
from megahead.config.data import DataConfig
from megahead.config.model import ModelConfig
from megahead.config.token_subsets import SUBSET_FIELDS, DroppingConfig
from megahead.errors import ConfigError

STRATEGIES = ("uniform", "whole_word", "span", "frequency", "informative", "hardest", "pmi", "weights")

WEIGHING: Mapping[str, Sequence[str]] = {
    "masking.strategy": STRATEGIES,
    "masking.dropping.by": get_args(DroppingConfig.model_fields["by"].annotation),
}
"""Settings that say by what tokens are selected, or kept, and the strategies that they know."""

_COURSES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - cos(pi * progress)) / 2,
}


FRAMING = ("mask_token", "cls_token", "sep_token", "special_tokens")
"""Fields by which an encoder's rows are framed, masked or not."""

_OF_OTHER_MASKS = (
    *("rate", "final_rate", "rate_course", "count", "mask_share", "random_share", "noise_share"),
    *SUBSET_FIELDS,
)
"""Fields that say what diffusion decides by itself."""

_DIFFUSED = ("uniform", "frequency", "informative", "weights")
"""Strategies that diffusion can mask by: of single tokens, and the same over a run."""


class MaskingConfig(Settings):
    """Masked-language modelling: some tokens of a row are replaced, and predicted from both sides.

    A row is [CLS], text, [SEP]. Targets are always the tokens of the text as it was; special tokens and padding are
    never selected. All draws depend on the seed and the sample's number alone.
    """

    mask_token: int = Field(ge=0)
    """Id that replaces masked tokens; never the padding token."""

    cls_token: int = Field(ge=0)
    """Id that begins each row."""

    sep_token: int = Field(ge=0)
    """Id that ends each row's text; may equal data.end_token."""

    special_tokens: list[int] = Field(default=[])
    """Further ids that are neither masked nor used as replacements, such as padding."""

    diffusion: bool = False
    """Masked diffusion (MDLM: Sahoo et al. 2024, arXiv 2406.07524): each row masks a random share of its tokens,
    and weights the loss by its inverse; the held-out loss bounds the text's. Only id-weighing strategies apply
    (arXiv 2509.05056)."""

    rate: float = Field(default=0.15, gt=0, lt=1)
    """Share of the text's tokens that are targets."""

    final_rate: float | None = Field(default=None, gt=0, lt=1)
    """This share at the last step, reached from `rate` at the first masked one; constant by default."""

    rate_course: Literal["linear", "cosine"] = "linear"
    """Schedule from `rate` to `final_rate` (masking ratio decay, arXiv 2208.10806)."""

    count: Literal["fixed", "bernoulli"] = "fixed"
    """`fixed`: equally many targets in each row (static shapes); `bernoulli`: an independent draw for each unit of
    text."""

    mask_share: float = Field(default=0.8, ge=0, le=1)
    """Share of the targets read as the mask token."""

    random_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the targets read as a random token; the rest is read unchanged."""

    noise_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the other tokens that is read as random tokens in training; the paper's code corrupts a tenth of the
    inputs."""

    masks_from_layer: int = Field(default=0, ge=0)
    """First layer that sees mask tokens; earlier ones compute only the other tokens (Liao et al. 2022, arXiv
    2211.04898; Meng et al. 2023, arXiv 2302.02060). Such models are exported without a head."""

    mask_decoder_layers: int = Field(default=0, ge=0)
    """bert: layers of a decoder after the encoder, which alone sees mask tokens (MAE-LM: Meng et al. 2023, arXiv
    2302.02060). Exports leave it out, and have no head."""

    dropping: DroppingConfig | None = None
    """Middle layers compute only important tokens; none by default."""

    strategy: str = "uniform"
    """What is masked: tokens with equal probability (`uniform`), whole words, spans of geometric length (`span`),
    rarer tokens (`frequency`), tokens informative about their neighbours (`informative`), tokens the model misses
    (`hardest`), collocations (`pmi`), tokens by data.id_weights (`weights`), or what a class of your own says, named
    as `path/to/file.py:Class` or `package.module:Class` (docs/extending.md)."""

    strategy_settings: dict[str, Any] = Field(default={})
    """What a strategy of your own reads."""

    span_stop: float = Field(default=0.2, gt=0, le=1)
    """span: length l has probability proportional to span_stop (1 - span_stop)^(l - 1), up to longest_span."""

    longest_span: int = Field(default=10, gt=0)
    """span, pmi, whole_word: most tokens masked together; longer units are cut between characters. With fixed
    counts at most a row's targets."""

    frequency_power: float = Field(default=0.5, gt=0)
    """frequency: a token's probability is proportional to count^-frequency_power."""

    adapt_every: int = Field(default=100, gt=0)
    """hardest: optimizer steps between updates of the weights; at least data.prefetch."""

    least_pmi: float = Field(default=4.0)
    """pmi: neighbours a b are masked together if log(p(ab) / (p(a) p(b))), in nats, is at least this."""

    least_count: int = Field(default=10, gt=0)
    """pmi, informative: least occurrences of a pair in the training text."""

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, value: str) -> str:
        if value in STRATEGIES:
            return value
        if ":" in value:
            return require_named("strategy", value)
        raise ConfigError("strategy", f"be one of {', '.join(STRATEGIES)}, or name a class", got=repr(value))

    @model_validator(mode="after")
    def _fits_together(self) -> MaskingConfig:
        if self.strategy_settings and not self.strategy_is_custom():
            rule = "be left out unless strategy names a class of your own"
            raise ConfigError("strategy_settings", rule, got=self.strategy_settings)
        ids = {"mask_token": self.mask_token, "cls_token": self.cls_token, "sep_token": self.sep_token}
        for name, value in ids.items():
            if list(ids.values()).count(value) > 1:
                raise ConfigError(name, "differ from the row's other special tokens", got=value)
        if self.mask_share + self.random_share > 1:
            raise ConfigError(
                "random_share", f"leave the sum with mask_share ({self.mask_share}) at most 1", got=self.random_share
            )
        if self.mask_share + self.random_share == 0:
            rule = "be above 0, or random_share, for targets that are not all read as they are"
            raise ConfigError("mask_share", rule, got=0)
        if self.final_rate == self.rate:
            raise ConfigError("final_rate", "be left out where it is the rate that it begins with", got=self.final_rate)
        if self.rate_course != "linear" and self.final_rate is None:
            raise ConfigError("rate_course", "be left out without final_rate", got=self.rate_course)
        if self.diffusion:
            self._refuse_beside_diffusion()
        return self

    def _refuse_beside_diffusion(self) -> None:
        for field in _OF_OTHER_MASKS:
            default, value = type(self).model_fields[field].default, getattr(self, field)
            if value != default:
                rule = "be left out with diffusion, which masks single tokens, a share of its own in each row"
                raise ConfigError(field, rule, got="given" if isinstance(value, Settings) else value)
        if self.strategy not in _DIFFUSED:
            raise ConfigError("strategy", f"be one of {', '.join(_DIFFUSED)} with diffusion", got=self.strategy)

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """ConfigError unless an encoder can read `data` so."""
        ids = (self.mask_token, self.cls_token, self.sep_token, *self.special_tokens)
        if max(ids) >= model.vocab_size:
            raise ConfigError("masking", f"name ids below model.vocab_size ({model.vocab_size})", got=max(ids))
        if data.end_token == self.mask_token:
            raise ConfigError("masking.mask_token", "differ from data.end_token", got=self.mask_token)
        if data.order == "stored":
            raise ConfigError("data.order", "be `shuffled` for an encoder", got="`stored`")
        if data.sequence_length < 4:
            raise ConfigError(
                "data.sequence_length", "have room for text between [CLS] and [SEP]", got=data.sequence_length
            )
        if self.adapts() and self.adapt_every < data.prefetch:
            rule = f"be at least data.prefetch ({data.prefetch}), the steps that are masked ahead"
            raise ConfigError("masking.adapt_every", rule, got=self.adapt_every)
        masks_at_a_rate = not self.diffusion and not model.is_causal
        if self.count == "fixed" and masks_at_a_rate:
            self._leaves_targets(data.sequence_length)
        if data.validation is not None and masks_at_a_rate and data.sequence_length < 6:
            rule = "leave a held-out row, 15 % of whose text are targets, one"
            raise ConfigError("data.sequence_length", rule, got=data.sequence_length, hint="set at least 6")
        if self.strategy == "whole_word" and data.tokenizer is None:
            raise ConfigError("data.tokenizer", "be given to find whole words (masking.strategy)", got="missing")

    def _leaves_targets(self, length: int) -> None:
        """ConfigError where a whole row has none."""
        for field in ("rate", "final_rate"):
            share = getattr(self, field)
            if share is not None and round(share * (length - 2)) == 0:
                rule = f"leave a row of data.sequence_length ({length}) a target"
                raise ConfigError(f"masking.{field}", rule, got=share, hint=f"set at least {1 / (length - 2):.2g}")

    def longest_unit(self, length: int) -> int:
        """Most tokens that are masked together in rows of `length`: of more than a row has targets none would be."""
        rate = self.rate if self.final_rate is None else min(self.rate, self.final_rate)
        fitting = self.longest_span if self.count == "bernoulli" else round(rate * (length - 2))
        return max(min(self.longest_span, fitting), 1)

    def masks_from(self, model: ModelConfig) -> int:
        """The first layer that sees mask tokens, of the model's or of the decoder behind these."""
        return model.num_layers if self.mask_decoder_layers else self.masks_from_layer

    def rate_at(self, progress: float) -> float:
        """Share of the tokens that are targets when `progress` (0 to 1) of the masked steps is done; of diffusion, the
        mean."""
        if self.diffusion:
            return 0.5
        last = self.rate if self.final_rate is None else self.final_rate
        return self.rate + (last - self.rate) * _COURSES[self.rate_course](min(max(progress, 0.0), 1.0))

    def never_masked(self, end_token: int) -> list[int]:
        """Ids that are never selected for masking, and never replace another token."""
        return [self.mask_token, self.cls_token, self.sep_token, end_token, *self.special_tokens]

    def strategy_is_custom(self) -> bool:
        """Whether it is a class of the user's."""
        return ":" in self.strategy

    def weighs_ids(self) -> bool:
        """Whether some ids are selected more often than others: by weight, or since they are of long words or
        collocations, which fit less often into what is left of a row's number. A strategy of one's own may."""
        if self.strategy_is_custom():
            return True
        together = self.strategy in ("whole_word", "pmi") and self.count == "fixed"
        return together or self.strategy in ("frequency", "informative", "hardest", "weights")

    def reads_weights(self) -> bool:
        """Whether a file says how important ids are."""
        return "weights" in self.weighed_by().values()

    def weighed_by(self) -> dict[str, str]:
        """The strategies that say what is selected, or kept, by setting."""
        kept = {"masking.dropping.by": self.dropping.by} if self.dropping else {}
        return {"masking.strategy": self.strategy} | kept

    def adapts(self) -> bool:
        """Whether what is selected, or kept, follows what the model has learned."""
        return "hardest" in self.weighed_by().values()

    def held_out(self) -> MaskingConfig:
        """How held-out rows are masked, the same for every run: 15 % of single tokens, 80 / 10 / 10 (by diffusion where
        that is trained); mask tokens enter where the model knows them."""
        kept = (*FRAMING, "diffusion", "masks_from_layer", "mask_decoder_layers")
        return MaskingConfig(**{name: getattr(self, name) for name in kept})


class MaskedInputsConfig(Settings):
    """Masks some tokens that a decoder reads; it still predicts the text (MEAP: Zhuang et al. 2025, arXiv
    2502.07490). Held-out text is not masked."""

    mask_token: int = Field(ge=0)
    """Id of masked tokens. It must not occur in the text: the tokenizer's mask token, or a new id (raise
    model.vocab_size by one)."""

    share: float = Field(default=0.15, gt=0, lt=1)
    """Share of each row's tokens that is masked; end tokens never are."""

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """ConfigError unless it is a decoder that reads so, and the mask token one that it has."""
        if model.is_encoder():
            raise ConfigError("masked_inputs", "be left out of an encoder", got="given", hint="it has `masking`")
        if self.mask_token >= model.vocab_size:
            rule = f"be below model.vocab_size ({model.vocab_size})"
            hint = f"for an id beyond the tokenizer's set model.vocab_size={self.mask_token + 1}"
            raise ConfigError("masked_inputs.mask_token", rule, got=self.mask_token, hint=hint)
        if round(self.share * data.sequence_length) == 0:
            rule = f"mask a token of a row of data.sequence_length ({data.sequence_length})"
            hint = f"set at least {1 / data.sequence_length:.2g}, or leave masked_inputs out"
            raise ConfigError("masked_inputs.share", rule, got=self.share, hint=hint)
        if self.mask_token == data.end_token:
            raise ConfigError("masked_inputs.mask_token", "differ from data.end_token", got=self.mask_token)
