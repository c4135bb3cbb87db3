"""The training objective: headless or vanilla, a schedule of both, and an auxiliary objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megahead.config.auxiliaries import (
    CustomConfig,
    MultiTokenConfig,
    PhrasesConfig,
    ReplacedTokensConfig,
    RetroMAEConfig,
    TSDAEConfig,
)
from megahead.config.auxiliary import AuxiliarySettings, Curve
from megahead.config.base import Settings, refuse, require
from megahead.config.data import BatchConfig
from megahead.errors import ConfigError


class ObjectiveScheduleConfig(Settings):
    """An objective that changes during the run. Both shares may be set."""

    causal_share: float | None = Field(default=None, gt=0, lt=1)
    """encoder: share of training.steps, from the first, that learns next tokens by causal attention; the rest learns
    masked tokens (arXiv 2507.00994)."""

    vanilla_share: float | None = Field(default=None, gt=0, lt=1)
    """headless: share of training.steps, up to the last, that trains a softmax over the vocabulary. Its head starts as
    the training-free head (docs/objective.md)."""

    @model_validator(mode="after")
    def _require_a_share(self) -> ObjectiveScheduleConfig:
        share = self.causal_share or self.vanilla_share
        require(share, "causal_share", "be given, or vanilla_share", got="missing", hint="or leave schedule out")
        return self

    def causal_steps(self, total_steps: int) -> int:
        """Number of causal steps at the beginning of a run."""
        return 0 if self.causal_share is None else round(self.causal_share * total_steps)

    def vanilla_start(self, total_steps: int) -> int:
        """The step at which the vanilla softmax starts; `total_steps` without one."""
        return total_steps if self.vanilla_share is None else total_steps - round(self.vanilla_share * total_steps)

    def check(self, total_steps: int) -> None:
        """Raises ConfigError unless each objective has a step."""
        rule = f"leave both objectives a step of training.steps ({total_steps})"
        switch_steps = {
            "causal_share": self.causal_steps(total_steps),
            "vanilla_share": self.vanilla_start(total_steps),
        }
        for name, step in switch_steps.items():
            share = getattr(self, name)
            require(share is None or 0 < step < total_steps, f"objective.schedule.{name}", rule, got=share)


@dataclass(frozen=True)
class ChunkSize:
    """How the loss splits its outputs into chunks; also read by `megahead estimate`, without torch."""

    score_bytes: int
    """Limit on the bytes of a chunk's scores, and of their gradients if these have a buffer of their own."""

    min_outputs: int
    """A chunk may have this many outputs even if their scores exceed `score_bytes`: each chunk costs a pass over the
    gradient of all rows."""

    multiple: int
    """Outputs in a chunk are a multiple of this, unless there are fewer."""

    def outputs_per_chunk(self, total: int, candidates: int, score_size: int) -> int:
        """Outputs per chunk for `total` outputs and scores of `score_size` bytes; chunks are equal and as few as
        possible."""
        fitting = self.score_bytes // (candidates * score_size) // self.multiple * self.multiple
        chunks = math.ceil(total / max(self.min_outputs, fitting))
        return min(total, math.ceil(total / chunks / self.multiple) * self.multiple)


CPU_CHUNKS = ChunkSize(score_bytes=8 * 2**20, min_outputs=256, multiple=1)
"""A chunk's scores are small compared to the gradients, yet its products run at full speed (measured on one core,
16,384 x 4,300 x 512: the same from 2 to 32 MiB, and no slower than the three products alone; with 50,304 candidates 256
outputs are 1.7 times as fast as 41)."""

GPU_CHUNKS = ChunkSize(score_bytes=2 * 2**30, min_outputs=1024, multiple=128)
"""In bf16 (2 bytes a score) one chunk has room for 16,384 outputs against 50,304 ids, or 65,536 against 16,384
candidates. Each further chunk costs its launches (0.14 to 0.25 ms of an H200's host, measured) and a pass over the
rows' gradient in float32 (206 MB at 50,304 x 512, computed). Below 1,024 outputs that pass dominates: for each element
it moves 8 bytes, and the product of n outputs has 2 n operations. Products are tiled by 128 outputs."""


def gpu_score_bytes(precision: str) -> int:
    """The bytes of a score of a loss on GPUs, and of its gradient: one buffer for both, except in fp16, whose scores
    are float32."""
    return {"bf16": 2, "fp16": 6, "fp32": 4}[precision]


GROUP_SHORTHANDS = ("micro_batch", "data_parallel", "global_batch")
"""Symbolic values of `group_samples`."""

HeadKind = Literal["pmi", "tied", "trained"]
HeadName = Literal["none", "tied", "pmi", "trained"]
"""The head of an export; `none`: the backbone alone."""


_AUXILIARY_CLASSES: dict[str, type[AuxiliarySettings]] = {
    "phrases": PhrasesConfig,
    "replaced_tokens": ReplacedTokensConfig,
    "retromae": RetroMAEConfig,
    "tsdae": TSDAEConfig,
    "multi_token": MultiTokenConfig,
    "custom": CustomConfig,
}
"""Fields of `ObjectiveConfig` for auxiliary objectives, with their settings."""


def auxiliary_curves() -> list[Curve]:
    """The charts of all auxiliary objectives, each once."""
    return list(dict.fromkeys(curve for settings in _AUXILIARY_CLASSES.values() for curve in settings.curves))


class ObjectiveConfig(Settings):
    """A softmax over candidate rows of the embedding (headless) or over all of them (vanilla)."""

    name: Literal["headless", "vanilla"] = "headless"
    """`headless`: contrastive weight tying, whose candidates are the targets of a group (`group_samples`);
    `vanilla`: the whole vocabulary."""

    tied: bool = False
    """vanilla: the head is the input embedding instead of a matrix of its own."""

    candidates: Literal["input", "own"] = "input"
    """headless: the table whose rows the candidates are. `input`: the input embedding (the paper); `own`: a second one
    of the same size, which evaluations and exports have as their head."""

    output_bias: bool = False
    """vanilla: a learned bias per token, which replaces BERT's transform in an encoder. With `init.from_checkpoint`
    of a headless run it starts as the bias of the training-free head, else as 0."""

    score: Literal["dot", "cosine", "harmonic"] = "dot"
    """Similarity of an output (a final hidden state) and a row: `dot`, their product (the paper); `cosine`; `harmonic`,
    minus the logarithm of their distance (harmonic loss, arXiv 2502.01628). Only `dot` exports with a head."""

    temperature: float = Field(default=1.0, gt=0)
    """Scores are divided by this; the paper has 1. Take 0.05 to 0.1 for a cosine, 1 / exponent for a harmonic score
    (docs/objective.md)."""

    learned_temperature: bool = False
    """Makes the temperature a parameter that starts at `temperature`, without weight decay."""

    group_samples: int | str = "micro_batch"
    """headless: consecutive samples of the global batch whose targets are candidates for each other; a divisor or
    multiple of batch.micro_size. `micro_batch` (the paper), `data_parallel` (one micro-step over all data ranks)
    and `global_batch` are resolved when the run starts, and kept."""

    bias: Literal["paper", "once", "corrected", "own_once"] = "paper"
    """headless: weight of a candidate in the softmax. `paper`: its number of occurrences in the group; `once`: 1;
    `corrected`: 1 / its inclusion probability (sampled softmax); `own_once`: as `paper`, but 1 for an output's own
    target."""

    negatives: int = Field(default=0, ge=0)
    """headless: random ids added to each group, drawn with replacement; each draw counts."""

    negatives_from: Literal["unigram", "uniform"] = "unigram"
    """Distribution of `negatives`: the dataset's token frequencies, or uniform."""

    max_candidates: int | None = Field(default=None, gt=0)
    """headless: most shared candidates; of more a sample by weight is reweighted, so that its sum is unbiased. An
    output's own target is always a candidate."""

    vanilla_weight: float = Field(default=0.0, ge=0, lt=1)
    """headless: weight of an added vanilla loss; the headless loss has 1 - this."""

    schedule: ObjectiveScheduleConfig | None = None
    """An objective that changes during the run."""

    replaced_tokens: ReplacedTokensConfig | None = None
    """encoder: replaced-token detection (ELECTRA), with this objective for the generator."""

    phrases: PhrasesConfig | None = None
    """encoder: also learns phrases that several rows share (NPM, arXiv 2212.01349)."""

    retromae: RetroMAEConfig | None = None
    """encoder: also reconstructs texts from the hidden state of [CLS], for retrieval (RetroMAE)."""

    tsdae: TSDAEConfig | None = None
    """encoder: also reconstructs texts from the hidden state of [CLS], after tokens were deleted (TSDAE)."""

    multi_token: MultiTokenConfig | None = None
    """decoder: also learns tokens further ahead (multi-token prediction)."""

    custom: CustomConfig | None = None
    """An auxiliary objective of your own, beside the softmax (docs/extending.md)."""

    @field_validator("group_samples")
    @classmethod
    def _check_group_samples(cls, value: int | str) -> int | str:
        valid = value in GROUP_SHORTHANDS or (not isinstance(value, str) and value > 0)
        rule = f"be a positive number of samples or {', '.join(GROUP_SHORTHANDS)}"
        require(valid, "group_samples", rule, got=value)
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> ObjectiveConfig:
        if self.name == "vanilla":
            rule, hint = "be left out of a vanilla objective", "use name: headless"
            fields = ("candidates", "group_samples", "bias", "negatives", "negatives_from", "max_candidates")
            for field, value in self.changed(*fields, "vanilla_weight").items():
                raise ConfigError(field, rule, got=value, hint=hint)
            require(not self.ends_with_vanilla(), "schedule.vanilla_share", rule, got="given", hint=hint)
        else:
            if self.vanilla_weight == 0 and not self.ends_with_vanilla():
                refuse("tied", self.tied, "of a headless objective without vanilla_weight")
            refuse("tied", self.tied and self.candidates == "own", "with candidates: own, whose table is the head")
            refuse("output_bias", self.output_bias, "of a headless objective")
        if self.score == "harmonic":
            refuse("learned_temperature", self.learned_temperature, "with score: harmonic")
        if self.vanilla_weight:
            why = "with vanilla_weight, whose head is trained from the beginning"
            refuse("schedule.vanilla_share", self.ends_with_vanilla() and "given", why)
        used = self.negatives_from == "unigram" or self.negatives
        rule = "be left out without negatives"
        require(used, "negatives_from", rule, got=self.negatives_from, hint="set negatives")
        for field in _AUXILIARY_CLASSES:
            is_second = getattr(self, field) is not None and field != self.auxiliary_name()
            refuse(field, is_second and "given", f"with {self.auxiliary_name()}: a run has one auxiliary objective")
        return self

    def auxiliary(self) -> AuxiliarySettings | None:
        """Settings of the auxiliary objective, or None."""
        return getattr(self, self.auxiliary_name(), None)

    def auxiliary_or_empty(self) -> AuxiliarySettings:
        """Settings of the auxiliary objective; without one, settings that add nothing."""
        return self.auxiliary() or AuxiliarySettings.model_construct(weight=0.0)

    def auxiliary_name(self) -> str:
        """The section of the auxiliary objective; empty without one."""
        return next((field for field in _AUXILIARY_CLASSES if getattr(self, field) is not None), "")

    def trains_head(self) -> bool:
        """Whether there is an output matrix separate from the input embedding."""
        return self.candidates == "own" or (not self.tied and self.has_vocabulary_softmax())

    def head(self) -> HeadKind:
        """The best language-model head: `trained`, a separate matrix; `tied`, the embedding; `pmi`, either of them
        and a training-free bias."""
        if not (self.has_vocabulary_softmax() or self.bias == "corrected"):
            return "pmi"  # scores are not log-probabilities
        return self.head_without_bias()

    def head_without_bias(self) -> HeadKind:
        """The head whose scores are those of training: `trained`, a separate matrix; or `tied`, the embedding."""
        return "trained" if self.trains_head() else "tied"

    def has_vocabulary_softmax(self) -> bool:
        """Whether the loss, or a part of it, is a softmax over all ids."""
        return self.name == "vanilla" or self.vanilla_weight > 0

    def has_mask_head(self) -> bool:
        """Whether an encoder has BERT's transform before its head."""
        return self.has_vocabulary_softmax() and not self.output_bias

    def ends_with_vanilla(self) -> bool:
        """Whether the `schedule` ends with the vanilla softmax."""
        return self.schedule is not None and self.schedule.vanilla_share is not None

    def first_phase(self) -> ObjectiveConfig:
        """The objective before a vanilla phase of the `schedule`."""
        unscheduled = self.model_copy(update={"schedule": None})
        return unscheduled.model_copy(update={"tied": False}) if self.ends_with_vanilla() else unscheduled

    def last_phase(self) -> ObjectiveConfig:
        """The vanilla objective at the end of a run with `schedule.vanilla_share`, beside its `custom` one."""
        fields = ("tied", "score", "temperature", "learned_temperature", "custom")
        shared = {name: getattr(self, name) for name in fields}
        return ObjectiveConfig(name="vanilla", output_bias=True, **shared)

    def token_counts_needed_by(self) -> str | None:
        """The setting that needs token counts of the dataset, or None."""
        if self.bias == "corrected":
            return "bias"
        if self.auxiliary_or_empty().samples_vocabulary():
            return f"{self.auxiliary_name()}.draws"
        return "negatives_from" if self.negatives > 0 and self.negatives_from == "unigram" else None


def resolve_candidate_group_samples(
    objective: ObjectiveConfig, batch: BatchConfig, data_ranks: int, saved: int | None = None
) -> int:
    """`objective.group_samples` as a number; `saved`: the number in the checkpoint that is resumed.

    ConfigError unless it is a multiple or divisor of the micro-batch, and a divisor of the global batch.
    """
    if objective.name == "vanilla":
        return batch.micro_size  # has no effect: all ids are candidates
    setting, micro_size = objective.group_samples, batch.micro_size
    sizes = (micro_size, micro_size * data_ranks, batch.global_size)
    size_by_shorthand = dict(zip(GROUP_SHORTHANDS, sizes, strict=True))
    samples = setting if isinstance(setting, int) else size_by_shorthand[setting] if saved is None else saved
    field = "objective.group_samples"
    require(saved in (None, samples), field, f"stay what the run began with ({saved})", got=samples)
    fits_micro_batch = samples % micro_size == 0 or micro_size % samples == 0
    require(fits_micro_batch, field, f"divide batch.micro_size ({micro_size}) or be a multiple", got=samples)
    divides_batch = batch.global_size % samples == 0
    require(divides_batch, field, f"divide batch.global_size ({batch.global_size})", got=samples)
    return samples
