"""Masking: masked-language modelling of encoders, masked inputs of decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import cos, pi
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from megahead.config.base import Settings, refuse, require, require_class_path
from megahead.config.data import DataConfig
from megahead.config.model import ModelConfig
from megahead.config.token_subsets import TOKEN_SUBSET_FIELDS, DroppingConfig
from megahead.errors import ConfigError
from megahead.wording import did_you_mean

STRATEGIES = ("uniform", "whole_word", "span", "frequency", "informative", "hardest", "pmi", "weights")

STRATEGIES_BY_SETTING: Mapping[str, Sequence[str]] = {
    "masking.strategy": STRATEGIES,
    "masking.dropping.by": get_args(DroppingConfig.model_fields["by"].annotation),
}
"""Settings that choose a strategy for selecting tokens, with their built-in strategies."""

_RATE_COURSES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - cos(pi * progress)) / 2,
}


SPECIAL_TOKEN_FIELDS = ("mask_token", "cls_token", "sep_token", "special_tokens")
"""Fields with the special tokens of an encoder's rows, whether they are masked or not."""

_NOT_WITH_DIFFUSION = (
    *("rate", "final_rate", "rate_course", "count", "mask_share", "random_share", "noise_share"),
    *TOKEN_SUBSET_FIELDS,
)
"""Fields that are refused with diffusion, which sets the shares itself and has no layers that compute only some
tokens."""

_DIFFUSION_STRATEGIES = ("uniform", "frequency", "informative", "weights")
"""Strategies for diffusion: they mask single tokens, and do not change during a run."""


class MaskingConfig(Settings):
    """Masked-language modelling on rows of [CLS], text, [SEP] (docs/masking.md). Special tokens and padding are never
    masked."""

    mask_token: int = Field(ge=0)
    """Id that replaces masked tokens; never the padding token."""

    cls_token: int = Field(ge=0)
    """Id that begins each row."""

    sep_token: int = Field(ge=0)
    """Id that ends each row's text; may equal data.end_token."""

    special_tokens: list[int] = Field(default=[])
    """Further ids that are neither masked nor used as replacements, such as padding."""

    diffusion: bool = False
    """Masked diffusion (MDLM, arXiv 2406.07524): each row masks a random share of its tokens and weights the loss by
    its inverse. Only strategies that weigh ids apply."""

    rate: float = Field(default=0.15, gt=0, lt=1)
    """Share of the text's tokens that are targets."""

    final_rate: float | None = Field(default=None, gt=0, lt=1)
    """This share at the last step, reached from `rate` at the first masked step."""

    rate_course: Literal["linear", "cosine"] = "linear"
    """Schedule from `rate` to `final_rate` (masking ratio decay, arXiv 2208.10806)."""

    count: Literal["fixed", "bernoulli"] = "fixed"
    """`fixed`: equally many targets in each row (static shapes); `bernoulli`: an independent draw for each unit of
    text."""

    mask_share: float = Field(default=0.8, ge=0, le=1)
    """Share of the targets replaced by the mask token."""

    random_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the targets replaced by a random token; the rest is unchanged."""

    noise_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the other tokens replaced by random tokens in training; the paper's code corrupts a tenth of the
    inputs."""

    masks_from_layer: int = Field(default=0, ge=0)
    """First layer that sees mask tokens; earlier ones compute only the other tokens (arXiv 2211.04898). Such models are
    exported without a head."""

    mask_decoder_layers: int = Field(default=0, ge=0)
    """bert: layers of a decoder after the encoder, which alone sees mask tokens (MAE-LM, arXiv 2302.02060). Exports
    leave it out, and have no head."""

    dropping: DroppingConfig | None = None
    """Middle layers compute only important tokens."""

    strategy: str = "uniform"
    """What is masked: `uniform`, `whole_word`, `span`, `frequency`, `informative`, `hardest`, `pmi` or `weights`
    (docs/masking.md), or a class of your own, `path/to/file.py:Class` or `package.module:Class` (docs/extending.md)."""

    strategy_settings: dict[str, Any] = Field(default={})
    """Settings for a strategy of your own."""

    span_stop: float = Field(default=0.2, gt=0, le=1)
    """span: length l has probability proportional to span_stop (1 - span_stop)^(l - 1), up to longest_span."""

    longest_span: int = Field(default=10, gt=0)
    """span, pmi, whole_word: most tokens masked together; longer units are cut between characters. With fixed
    counts at most a row's targets."""

    frequency_power: float = Field(default=0.5, gt=0)
    """frequency: a token's probability is proportional to count^-frequency_power."""

    adapt_every: int = Field(default=100, gt=0)
    """hardest: optimizer steps between updates of id weights; at least data.prefetch."""

    least_pmi: float = Field(default=4.0)
    """pmi: neighbours a b are masked together if log(p(ab) / (p(a) p(b))), in nats, is at least this."""

    least_count: int = Field(default=10, gt=0)
    """pmi, informative: least occurrences of a pair in the training text."""

    @field_validator("strategy")
    @classmethod
    def _check_strategy(cls, value: str) -> str:
        rule = f"be one of {', '.join(STRATEGIES)}, or name a class"
        valid = value in STRATEGIES or ":" in value
        require(valid, "strategy", rule, got=repr(value), hint=did_you_mean(value, STRATEGIES))
        return require_class_path("strategy", value) if ":" in value else value

    @model_validator(mode="after")
    def _check_consistency(self) -> MaskingConfig:
        if not self.strategy_is_custom():
            refuse("strategy_settings", self.strategy_settings, "unless strategy names a class of your own")
        ids = {"mask_token": self.mask_token, "cls_token": self.cls_token, "sep_token": self.sep_token}
        for name, value in ids.items():
            is_unique = list(ids.values()).count(value) == 1
            require(is_unique, name, "differ from the row's other special tokens", got=value)
        replaced_share = self.mask_share + self.random_share
        rule = f"leave the sum with mask_share ({self.mask_share}) at most 1"
        require(replaced_share <= 1, "random_share", rule, got=self.random_share)
        rule = "be above 0, or random_share, for targets that are not all read as they are"
        require(replaced_share, "mask_share", rule, got=0)
        rule = "differ from rate, with which it begins"
        require(self.final_rate != self.rate, "final_rate", rule, got=self.final_rate)
        if self.final_rate is None:
            refuse("rate_course", self.rate_course != "linear" and self.rate_course, "without final_rate")
        if self.diffusion:
            self._check_diffusion()
        return self

    def _check_diffusion(self) -> None:
        rule = "be left out with diffusion, which masks single tokens, a share of its own in each row"
        for field, value in self.changed(*_NOT_WITH_DIFFUSION).items():
            raise ConfigError(field, rule, got=value)
        rule = f"be one of {', '.join(_DIFFUSION_STRATEGIES)} with diffusion"
        require(self.strategy in _DIFFUSION_STRATEGIES, "strategy", rule, got=self.strategy)

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """Raises ConfigError unless the encoder `model` can be trained on `data` with this masking."""
        largest = max(self.mask_token, self.cls_token, self.sep_token, *self.special_tokens)
        rule = f"name ids below model.vocab_size ({model.vocab_size})"
        require(largest < model.vocab_size, "masking", rule, got=largest)
        smallest = min(self.special_tokens, default=0)
        require(smallest >= 0, "masking.special_tokens", "name ids of at least 0", got=smallest)
        self._check_padding(model, data)
        length = data.sequence_length
        for name, token in {"mask_token": self.mask_token, "cls_token": self.cls_token}.items():
            require(token != data.end_token, f"masking.{name}", "differ from data.end_token", got=token)
        require(data.order != "stored", "data.order", "be `shuffled` for an encoder", got="`stored`")
        require(length >= 4, "data.sequence_length", "have room for text between [CLS] and [SEP]", got=length)
        rule = f"be at least data.prefetch ({data.prefetch}), the steps that are masked ahead"
        too_frequent = self.is_adaptive() and self.adapt_every < data.prefetch
        require(not too_frequent, "masking.adapt_every", rule, got=self.adapt_every)
        if not self.diffusion and not model.is_causal:
            self._check_targets_per_row(data)
        has_spellings = self.strategy != "whole_word" or data.tokenizer is not None
        require(has_spellings, "data.tokenizer", "be given to find whole words (masking.strategy)", got="missing")

    def _check_padding(self, model: ModelConfig, data: DataConfig) -> None:
        """Raises ConfigError if rows may contain a RoBERTa's padding token, which has no position."""
        padding, hint = model.padding_token(), "its tokens have no position, and the text must not contain it"
        if padding is not None:
            rule = f"include {padding}, the padding id of a {model.family} (model.position_offset - 1)"
            require(padding in self.special_tokens, "masking.special_tokens", rule, got=self.special_tokens, hint=hint)
            is_other = padding in (self.mask_token, self.cls_token, self.sep_token, data.end_token)
            rule, got = "follow a padding id that is no other special token", f"{model.position_offset} (id {padding})"
            require(not is_other, "model.position_offset", rule, got=got)

    def _check_targets_per_row(self, data: DataConfig) -> None:
        """Raises ConfigError if a whole row has no target."""
        length = data.sequence_length
        for field in ("rate", "final_rate") if self.count == "fixed" else ():
            share, rule = getattr(self, field), f"leave a row of data.sequence_length ({length}) a target"
            has_target, hint = share is None or round(share * (length - 2)), f"set at least {1 / (length - 2):.2g}"
            require(has_target, f"masking.{field}", rule, got=share, hint=hint)
        rule = "leave a target in a held-out row, of which 15 % are masked"
        has_target = data.validation is None or length >= 6
        require(has_target, "data.sequence_length", rule, got=length, hint="set at least 6")

    def max_unit_length(self, length: int, longest: int | None = None) -> int:
        """Largest number of tokens of a unit (tokens masked together) in rows of `length` tokens: `longest`, by default
        `longest_span`, but with a fixed count a unit with more tokens than a row has targets would never be masked."""
        longest = longest or self.longest_span
        rate = self.rate if self.final_rate is None else min(self.rate, self.final_rate)
        targets = longest if self.count == "bernoulli" else round(rate * (length - 2))
        return max(min(longest, targets), 1)

    def first_masked_layer(self, model: ModelConfig) -> int:
        """The first layer that sees mask tokens; layers of the mask decoder are counted after the model's."""
        return model.num_layers if self.mask_decoder_layers else self.masks_from_layer

    def rate_at(self, progress: float) -> float:
        """Share of tokens that are targets after `progress` (0 to 1) of the masked steps; under diffusion the mean."""
        if self.diffusion:
            return 0.5
        last = self.rate if self.final_rate is None else self.final_rate
        return self.rate + (last - self.rate) * _RATE_COURSES[self.rate_course](min(max(progress, 0.0), 1.0))

    def unmaskable_ids(self, end_token: int) -> list[int]:
        """Ids that are never masked, and never replace another token."""
        return [self.mask_token, self.cls_token, self.sep_token, end_token, *self.special_tokens]

    def strategy_is_custom(self) -> bool:
        """Whether the strategy is a user's class."""
        return ":" in self.strategy

    def skews_targets(self) -> bool:
        """Whether some ids are targets more often than others: by weight, or since long words and collocations fit less
        often into a row's fixed number of targets. True for a user's strategy."""
        if self.strategy_is_custom():
            return True
        fills_fixed_count = self.strategy in ("whole_word", "pmi") and self.count == "fixed"
        return fills_fixed_count or self.strategy in ("frequency", "informative", "hardest", "weights")

    def uses_id_weights(self) -> bool:
        """Whether `data.id_weights` is needed."""
        return "weights" in self.strategies_by_setting().values()

    def strategies_by_setting(self) -> dict[str, str]:
        """The strategies by which tokens are masked and dropped, by setting."""
        dropping = {"masking.dropping.by": self.dropping.by} if self.dropping else {}
        return {"masking.strategy": self.strategy} | dropping

    def is_adaptive(self) -> bool:
        """Whether a strategy follows the model's errors."""
        return "hardest" in self.strategies_by_setting().values()

    def for_evaluation(self) -> MaskingConfig:
        """The masking of held-out rows, equal for every run: 15 % of single tokens, 80 / 10 / 10 (diffusion if trained
        with it), with mask tokens from the same layer as in training."""
        fields = (*SPECIAL_TOKEN_FIELDS, "diffusion", "masks_from_layer", "mask_decoder_layers")
        return MaskingConfig(**{name: getattr(self, name) for name in fields})


class MaskedInputsConfig(Settings):
    """Masks some tokens that a decoder reads; it still predicts the text (MEAP, arXiv 2502.07490). Held-out text is not
    masked."""

    mask_token: int = Field(ge=0)
    """Id of masked tokens. It must not occur in the text: the tokenizer's mask token, or a new id (raise
    model.vocab_size by one)."""

    share: float = Field(default=0.15, gt=0, lt=1)
    """Share of each row's tokens that is masked; end tokens never are."""

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """Raises ConfigError unless `model` is a decoder, its vocabulary has the mask token, and each row a masked
        token."""
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
