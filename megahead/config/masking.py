"""What is masked: rows of encoders, masked inputs of decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import cos, pi
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from megahead.config.base import Settings, refuse, require, require_class_path
from megahead.config.data import DataConfig
from megahead.config.model import ModelConfig
from megahead.config.token_subsets import SUBSET_FIELDS, DroppingConfig
from megahead.errors import ConfigError
from megahead.wording import did_you_mean

STRATEGIES = ("uniform", "whole_word", "span", "frequency", "informative", "hardest", "pmi", "weights")

STRATEGIES_BY_SETTING: Mapping[str, Sequence[str]] = {
    "masking.strategy": STRATEGIES,
    "masking.dropping.by": get_args(DroppingConfig.model_fields["by"].annotation),
}
"""Settings that say by what tokens are selected, or kept, and the strategies that they know."""

_COURSES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - cos(pi * progress)) / 2,
}


SPECIAL_TOKEN_FIELDS = ("mask_token", "cls_token", "sep_token", "special_tokens")
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
        rule = f"be one of {', '.join(STRATEGIES)}, or name a class"
        known = value in STRATEGIES or ":" in value
        require(known, "strategy", rule, got=repr(value), hint=did_you_mean(value, STRATEGIES))
        return require_class_path("strategy", value) if ":" in value else value

    @model_validator(mode="after")
    def _fits_together(self) -> MaskingConfig:
        if not self.strategy_is_custom():
            refuse("strategy_settings", self.strategy_settings, "unless strategy names a class of your own")
        ids = {"mask_token": self.mask_token, "cls_token": self.cls_token, "sep_token": self.sep_token}
        for name, value in ids.items():
            alone = list(ids.values()).count(value) == 1
            require(alone, name, "differ from the row's other special tokens", got=value)
        read_otherwise = self.mask_share + self.random_share
        rule = f"leave the sum with mask_share ({self.mask_share}) at most 1"
        require(read_otherwise <= 1, "random_share", rule, got=self.random_share)
        rule = "be above 0, or random_share, for targets that are not all read as they are"
        require(read_otherwise, "mask_share", rule, got=0)
        rule = "be left out where it is the rate that it begins with"
        require(self.final_rate != self.rate, "final_rate", rule, got=self.final_rate)
        if self.final_rate is None:
            refuse("rate_course", self.rate_course != "linear" and self.rate_course, "without final_rate")
        if self.diffusion:
            self._refuse_beside_diffusion()
        return self

    def _refuse_beside_diffusion(self) -> None:
        rule = "be left out with diffusion, which masks single tokens, a share of its own in each row"
        for field, value in self.changed(*_OF_OTHER_MASKS).items():
            raise ConfigError(field, rule, got=value)
        rule = f"be one of {', '.join(_DIFFUSED)} with diffusion"
        require(self.strategy in _DIFFUSED, "strategy", rule, got=self.strategy)

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """ConfigError unless an encoder can read `data` so."""
        largest = max(self.mask_token, self.cls_token, self.sep_token, *self.special_tokens)
        rule = f"name ids below model.vocab_size ({model.vocab_size})"
        require(largest < model.vocab_size, "masking", rule, got=largest)
        differ, length = data.end_token != self.mask_token, data.sequence_length
        require(differ, "masking.mask_token", "differ from data.end_token", got=self.mask_token)
        require(data.order != "stored", "data.order", "be `shuffled` for an encoder", got="`stored`")
        require(length >= 4, "data.sequence_length", "have room for text between [CLS] and [SEP]", got=length)
        rule = f"be at least data.prefetch ({data.prefetch}), the steps that are masked ahead"
        late = self.is_adaptive() and self.adapt_every < data.prefetch
        require(not late, "masking.adapt_every", rule, got=self.adapt_every)
        if not self.diffusion and not model.is_causal:
            self._leaves_targets(data)
        spelled = self.strategy != "whole_word" or data.tokenizer is not None
        require(spelled, "data.tokenizer", "be given to find whole words (masking.strategy)", got="missing")

    def _leaves_targets(self, data: DataConfig) -> None:
        """ConfigError where a whole row has none."""
        length = data.sequence_length
        for field in ("rate", "final_rate") if self.count == "fixed" else ():
            share, rule = getattr(self, field), f"leave a row of data.sequence_length ({length}) a target"
            there, hint = share is None or round(share * (length - 2)), f"set at least {1 / (length - 2):.2g}"
            require(there, f"masking.{field}", rule, got=share, hint=hint)
        rule = "leave a held-out row, 15 % of whose text are targets, one"
        there = data.validation is None or length >= 6
        require(there, "data.sequence_length", rule, got=length, hint="set at least 6")

    def max_unit_length(self, length: int) -> int:
        """Most tokens that are masked together in rows of `length`: of more than a row has targets none would be."""
        rate = self.rate if self.final_rate is None else min(self.rate, self.final_rate)
        fitting = self.longest_span if self.count == "bernoulli" else round(rate * (length - 2))
        return max(min(self.longest_span, fitting), 1)

    def first_masked_layer(self, model: ModelConfig) -> int:
        """The first layer that sees mask tokens, of the model's or of the decoder behind these."""
        return model.num_layers if self.mask_decoder_layers else self.masks_from_layer

    def rate_at(self, progress: float) -> float:
        """Share of the tokens that are targets when `progress` (0 to 1) of the masked steps is done; of diffusion, the
        mean."""
        if self.diffusion:
            return 0.5
        last = self.rate if self.final_rate is None else self.final_rate
        return self.rate + (last - self.rate) * _COURSES[self.rate_course](min(max(progress, 0.0), 1.0))

    def unmaskable_ids(self, end_token: int) -> list[int]:
        """Ids that are never selected for masking, and never replace another token."""
        return [self.mask_token, self.cls_token, self.sep_token, end_token, *self.special_tokens]

    def strategy_is_custom(self) -> bool:
        """Whether it is a class of the user's."""
        return ":" in self.strategy

    def skews_targets(self) -> bool:
        """Whether some ids are selected more often than others: by weight, or since they are of long words or
        collocations, which fit less often into what is left of a row's number. A strategy of one's own may."""
        if self.strategy_is_custom():
            return True
        together = self.strategy in ("whole_word", "pmi") and self.count == "fixed"
        return together or self.strategy in ("frequency", "informative", "hardest", "weights")

    def uses_id_weights(self) -> bool:
        """Whether a file says how important ids are."""
        return "weights" in self.strategies_by_setting().values()

    def strategies_by_setting(self) -> dict[str, str]:
        """The strategies that say what is selected, or kept, by setting."""
        kept = {"masking.dropping.by": self.dropping.by} if self.dropping else {}
        return {"masking.strategy": self.strategy} | kept

    def is_adaptive(self) -> bool:
        """Whether what is selected, or kept, follows what the model has learned."""
        return "hardest" in self.strategies_by_setting().values()

    def for_evaluation(self) -> MaskingConfig:
        """How held-out rows are masked, the same for every run: 15 % of single tokens, 80 / 10 / 10 (by diffusion where
        that is trained); mask tokens enter where the model knows them."""
        kept = (*SPECIAL_TOKEN_FIELDS, "diffusion", "masks_from_layer", "mask_decoder_layers")
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
        hint = "it has `masking`"
        require(not model.is_encoder(), "masked_inputs", "be left out of an encoder", got="given", hint=hint)
        token, length = self.mask_token, data.sequence_length
        rule = f"be below model.vocab_size ({model.vocab_size})"
        hint = f"for an id beyond the tokenizer's set model.vocab_size={token + 1}"
        require(token < model.vocab_size, "masked_inputs.mask_token", rule, got=token, hint=hint)
        rule = f"mask a token of a row of data.sequence_length ({length})"
        hint = f"set at least {1 / length:.2g}, or leave masked_inputs out"
        require(round(self.share * length), "masked_inputs.share", rule, got=self.share, hint=hint)
        require(token != data.end_token, "masked_inputs.mask_token", "differ from data.end_token", got=token)
