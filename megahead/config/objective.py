"""What a run learns: headless or vanilla, a schedule of both, and an auxiliary objective beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megahead.config.auxiliary import AuxiliarySettings, Curve, CustomConfig
from megahead.config.base import Settings, refuse, require
from megahead.config.data import BatchConfig
from megahead.config.phrases import PhrasesConfig
from megahead.config.replaced_tokens import ReplacedTokensConfig
from megahead.errors import ConfigError


class ObjectiveScheduleConfig(Settings):
    """An objective that changes during the run, with one set of weights, optimizer state and learning-rate
    schedule. Both shares may be set."""

    causal_share: float | None = Field(default=None, gt=0, lt=1)
    """encoder: share of training.steps, from the first, that learns next tokens by causal attention; the rest
    learns masked tokens (CLM, then MLM: Gisserot-Boukhlef et al. 2025, arXiv 2507.00994)."""

    vanilla_share: float | None = Field(default=None, gt=0, lt=1)
    """headless: share of training.steps, up to the last, that trains a softmax over the vocabulary. Its head starts
    as the training-free head: the embedding (`objective.tied`) or a copy, and a bias per token. Evaluations and
    exports are a vanilla model's from then on."""

    @model_validator(mode="after")
    def _has_a_switch(self) -> ObjectiveScheduleConfig:
        given = self.causal_share or self.vanilla_share
        require(given, "causal_share", "be given, or vanilla_share", got="missing", hint="or leave schedule out")
        return self

    def causal_steps(self, steps: int) -> int:
        """How many of a run's `steps` are causal because of the schedule."""
        return 0 if self.causal_share is None else round(self.causal_share * steps)

    def vanilla_start(self, steps: int) -> int:
        """How many of a run's `steps` come before the vanilla softmax; all without it."""
        return steps if self.vanilla_share is None else steps - round(self.vanilla_share * steps)

    def check(self, steps: int) -> None:
        """ConfigError unless each objective has a step."""
        rule = f"leave both objectives a step of training.steps ({steps})"
        switches = {"causal_share": self.causal_steps(steps), "vanilla_share": self.vanilla_start(steps)}
        for name, switch in switches.items():
            share = getattr(self, name)
            require(share is None or 0 < switch < steps, f"objective.schedule.{name}", rule, got=share)


@dataclass(frozen=True)
class ChunkSize:
    """How the outputs of a loss are cut into chunks, in the loss itself and in estimates."""

    score_bytes: int
    """Bytes of the scores that are held at once."""

    min_outputs: int
    """Outputs that a chunk may have however many candidates there are: each further chunk costs a pass over the
    gradient of all rows."""

    multiple: int
    """Outputs in a chunk are a multiple of this, unless there are fewer."""

    def outputs(self, total: int, candidates: int, score_size: int) -> int:
        """Outputs per chunk, of `total` outputs with this many candidates and scores of `score_size` bytes: equal
        chunks, no more of them than needed."""
        fitting = self.score_bytes // (candidates * score_size) // self.multiple * self.multiple
        chunks = math.ceil(total / max(self.min_outputs, fitting))
        return min(total, math.ceil(total / chunks / self.multiple) * self.multiple)


CPU_CHUNKS = ChunkSize(score_bytes=8 * 2**20, min_outputs=256, multiple=1)
"""Small beside the gradients, large enough that each chunk's products run at full speed (measured on one core, 16,384 x
4,300 x 512: the same from 2 to 32 MiB, and no slower than the three products alone; with 50,304 candidates 256 outputs
are 1.7 times as fast as 41)."""

GPU_CHUNKS = ChunkSize(score_bytes=128 * 2**20, min_outputs=1024, multiple=128)
"""float32 scores and half-precision residuals, 192 MiB together: so many, of 512 features, take an H100 0.34 ms or more
(computed); to ask for a chunk's kernels took an H200's host 0.14 to 0.25 ms (measured). With fewer than 1,024 outputs,
adding to the rows' gradient is bound by memory: 8 bytes moved for 2 n operations, n outputs. Products compute 128
outputs at a time."""


GROUP_SHORTHANDS = ("micro_batch", "data_parallel", "global_batch")
"""Names for the number of samples of a candidate group (`group_samples`)."""

HeadKind = Literal["pmi", "tied", "trained"]
HeadName = Literal["none", "tied", "pmi", "trained"]
"""The head of an export; `none` for the backbone alone."""


_Kinds = dict[str, type[AuxiliarySettings]]
_AUXILIARY_CLASSES: _Kinds = {"phrases": PhrasesConfig, "replaced_tokens": ReplacedTokensConfig, "custom": CustomConfig}
"""Fields of `ObjectiveConfig` for auxiliary objectives."""


def auxiliary_curves() -> list[Curve]:
    """Charts of what auxiliary objectives log."""
    return [curve for kind in _AUXILIARY_CLASSES.values() for curve in kind.curves]


class ObjectiveConfig(Settings):
    """A softmax over candidate rows of the embedding (headless) or over all of them (vanilla)."""

    name: Literal["headless", "vanilla"] = "headless"
    """`headless`: contrastive weight tying, whose candidates are the targets of a group (`group_samples`);
    `vanilla`: the whole vocabulary."""

    tied: bool = False
    """vanilla: the head is the input embedding instead of a matrix of its own."""

    output_bias: bool = False
    """vanilla: a learned bias per token, which replaces BERT's transform in an encoder. With `init.from_checkpoint`
    of a headless run it starts as the bias of the training-free head, else as 0."""

    score: Literal["dot", "cosine", "harmonic"] = "dot"
    """Similarity of an output (a final hidden state) and a row: `dot`, their product (the paper); `cosine`; `harmonic`,
    minus the logarithm of their distance (harmonic loss, arXiv 2502.01628). Only `dot` exports with a head."""

    temperature: float = Field(default=1.0, gt=0)
    """Scores are divided by this; the paper has 1. Take 0.05 to 0.1 for a cosine; 1 / exponent for a harmonic
    score, whose paper has sqrt(hidden_size) as exponent."""

    learned_temperature: bool = False
    """Makes the temperature a parameter that starts at `temperature`, without weight decay."""

    group_samples: int | str = "micro_batch"
    """headless: consecutive samples of the global batch whose targets are candidates for each other; a divisor or
    multiple of batch.micro_size. `micro_batch` (the paper), `data_parallel` (one micro-step over all data ranks)
    and `global_batch` are resolved when the run starts, and kept."""

    bias: Literal["paper", "once", "corrected", "own_once"] = "paper"
    """headless: weight of a candidate in the softmax. `paper`: its number of occurrences in the group; `once`: 1;
    `corrected`: 1 / its inclusion probability (sampled softmax: scores become log-probabilities without an added
    bias); `own_once`: as `paper`, but 1 for an output's own target (an ablation)."""

    negatives: int = Field(default=0, ge=0)
    """headless: random ids added to each group, drawn with replacement; each draw counts."""

    negatives_from: Literal["unigram", "uniform"] = "unigram"
    """Distribution of `negatives`: the dataset's token frequencies, or uniform."""

    max_candidates: int | None = Field(default=None, gt=0)
    """headless: most shared candidates, sampled by weight and reweighted without bias; an output's own target is
    always a candidate. No limit by default."""

    vanilla_weight: float = Field(default=0.0, ge=0, lt=1)
    """headless: weight of an added vanilla loss; the headless loss has weight 1 - this."""

    schedule: ObjectiveScheduleConfig | None = None
    """An objective that changes during the run; constant by default."""

    replaced_tokens: ReplacedTokensConfig | None = None
    """encoder: replaced-token detection (ELECTRA), with this objective for the generator; none by default."""

    phrases: PhrasesConfig | None = None
    """encoder: also learns phrases that several rows share (NPM); none by default."""

    custom: CustomConfig | None = None
    """An auxiliary objective of your own, beside the softmax (docs/extending.md)."""

    @field_validator("group_samples")
    @classmethod
    def _known_group(cls, value: int | str) -> int | str:
        known = value in GROUP_SHORTHANDS or (not isinstance(value, str) and value > 0)
        rule = f"be a positive number of samples or {', '.join(GROUP_SHORTHANDS)}"
        require(known, "group_samples", rule, got=value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> ObjectiveConfig:
        if self.name == "vanilla":
            rule, hint = "be left out of a vanilla objective", "use name: headless"
            fields = ("group_samples", "bias", "negatives", "max_candidates", "vanilla_weight")
            for field, value in self.changed(*fields).items():
                raise ConfigError(field, rule, got=value, hint=hint)
            require(not self.ends_with_vanilla(), "schedule.vanilla_share", rule, got="given", hint=hint)
        else:
            if self.vanilla_weight == 0 and not self.ends_with_vanilla():
                refuse("tied", self.tied, "of a headless objective without vanilla_weight")
            refuse("output_bias", self.output_bias, "of a headless objective")
        if self.score == "harmonic":
            refuse("learned_temperature", self.learned_temperature, "with score: harmonic")
        if self.vanilla_weight:
            why = "with vanilla_weight, whose head is trained from the beginning"
            refuse("schedule.vanilla_share", self.ends_with_vanilla() and "given", why)
        drawn = self.negatives_from == "unigram" or self.negatives
        rule = "be left out without negatives"
        require(drawn, "negatives_from", rule, got=self.negatives_from, hint="set negatives")
        for field in _AUXILIARY_CLASSES:
            beside = getattr(self, field) is not None and field != self.auxiliary_name()
            refuse(field, beside and "given", f"with {self.auxiliary_name()}: a run has one auxiliary objective")
        return self

    def auxiliary(self) -> AuxiliarySettings | None:
        """What is learned beside the softmax; None where nothing is."""
        return getattr(self, self.auxiliary_name(), None)

    def auxiliary_name(self) -> str:
        """Its section's name; empty where there is none."""
        return next((field for field in _AUXILIARY_CLASSES if getattr(self, field) is not None), "")

    def trains_head(self) -> bool:
        """Whether there is an output matrix beside the input embedding."""
        return not self.tied and self.has_vocabulary_softmax()

    def head(self) -> HeadKind:
        """The language-model head of such a run: `trained`, a matrix of its own; `tied`, the embedding as it
        is; `pmi`, the embedding and a bias that needs no training."""
        if self.trains_head():
            return "trained"
        learns_log_probabilities = self.has_vocabulary_softmax() or self.bias == "corrected"
        return "tied" if learns_log_probabilities else "pmi"

    def has_vocabulary_softmax(self) -> bool:
        """Whether all ids compete, in all of the loss or a share of it."""
        return self.name == "vanilla" or self.vanilla_weight > 0

    def has_mask_head(self) -> bool:
        """Whether an encoder has BERT's transform."""
        return self.has_vocabulary_softmax() and not self.output_bias

    def ends_with_vanilla(self) -> bool:
        """Whether the run ends with the vanilla softmax by its `schedule`."""
        return self.schedule is not None and self.schedule.vanilla_share is not None

    def first_phase(self) -> ObjectiveConfig:
        """What a run with a `schedule` begins with."""
        unscheduled = self.model_copy(update={"schedule": None})
        return unscheduled.model_copy(update={"tied": False}) if self.ends_with_vanilla() else unscheduled

    def last_phase(self) -> ObjectiveConfig:
        """The vanilla softmax that a run with `schedule.vanilla_share` ends with."""
        kept = {name: getattr(self, name) for name in ("tied", "score", "temperature", "learned_temperature")}
        return ObjectiveConfig(name="vanilla", output_bias=True, **kept)

    def groups_are_micro_batches(self) -> bool:
        """Whether a smaller micro-batch has fewer candidates."""
        return self.name == "headless" and self.group_samples == "micro_batch"

    def token_counts_needed_by(self) -> str | None:
        """The setting by which the dataset must have token counts; None where it need not."""
        if self.bias == "corrected":
            return "bias"
        auxiliary = self.auxiliary()
        if auxiliary is not None and (needing := auxiliary.token_counts_needed_by()):
            return needing
        return "negatives_from" if self.negatives > 0 and self.negatives_from == "unigram" else None


def resolve_candidate_group_samples(
    objective: ObjectiveConfig, batch: BatchConfig, data_ranks: int, stored: int | None = None
) -> int:
    """Samples of a candidate group, as a number; `stored`: the number in the checkpoint that is resumed.

    ConfigError unless a group is a number of whole micro-batches or an equal part of one, and the global batch is a
    number of whole groups.
    """
    if objective.name == "vanilla":
        return batch.micro_size  # which does not matter: all ids are candidates
    asked = objective.group_samples
    shorthands = dict(
        zip(GROUP_SHORTHANDS, (batch.micro_size, batch.micro_size * data_ranks, batch.global_size), strict=True)
    )
    samples = asked if isinstance(asked, int) else shorthands[asked] if stored is None else stored
    field, micro_size = "objective.group_samples", batch.micro_size
    require(stored in (None, samples), field, f"stay what the run began with ({stored})", got=samples)
    fits = samples % micro_size == 0 or micro_size % samples == 0
    require(fits, field, f"divide batch.micro_size ({micro_size}) or be a multiple", got=samples)
    whole = batch.global_size % samples == 0
    require(whole, field, f"divide batch.global_size ({batch.global_size})", got=samples)
    return samples
