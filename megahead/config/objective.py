"""The objective: pick each output's target among the targets of a candidate group (headless: contrastive weight tying),
or among the whole vocabulary (vanilla)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from megahead.config.base import Settings
from megahead.config.batch import BatchConfig
from megahead.config.objective_schedule import ObjectiveScheduleConfig
from megahead.config.phrases import PhrasesConfig
from megahead.config.replaced_tokens import ReplacedTokensConfig
from megahead.errors import ConfigError

GROUP_SHORTHANDS = ("micro_batch", "data_parallel", "global_batch")
"""Names for the number of samples of a candidate group (`group_samples`)."""

HeadKind = Literal["pmi", "tied", "trained"]
HeadName = Literal["none", "tied", "pmi", "trained"]
"""The head of an export; `none` for the backbone alone."""


class ObjectiveConfig(Settings):
    """One softmax over candidate rows of the embedding table (headless) or over all of it (vanilla)."""

    name: Literal["headless", "vanilla"] = "headless"
    """`headless`: contrastive weight tying, whose candidates are the targets of a candidate group (`group_samples`);
    `vanilla`: the whole vocabulary."""

    tied: bool = False
    """vanilla softmax only: the head is the input embedding itself, instead of a matrix of its own."""

    output_bias: bool = False
    """vanilla: a learned bias for each token; an encoder has it instead of BERT's transform. In a run that starts from
    a headless run's weights (`init.from_checkpoint`) it starts as the bias of the training-free head, else as 0."""

    score: Literal["dot", "cosine", "harmonic"] = "dot"
    """How an output (a final hidden state) is compared with a row: `dot`, their product (the paper); `cosine` of both;
    `harmonic`, minus the logarithm of their distance (harmonic loss, arXiv 2502.01628). Only a dot product can be
    exported with a head."""

    temperature: float = Field(default=1.0, gt=0)
    """Scores are divided by this; the paper uses 1. A cosine needs some 0.05 to 0.1; for a harmonic score it
    is 1 / exponent, and that paper's exponent is the square root of hidden_size."""

    learned_temperature: bool = False
    """The temperature is a parameter that starts at `temperature`, without weight decay."""

    group_samples: int | str = "micro_batch"
    """headless: size of a candidate group, consecutive samples of the global batch whose targets are candidates for
    each other; a divisor or a multiple of batch.micro_size. `micro_batch` (the paper), `data_parallel` (one micro-step
    over all data ranks) and `global_batch` stand for the number of samples that these have when the run starts; it is
    kept on any later number of ranks."""

    bias: Literal["paper", "once", "corrected", "own_once"] = "paper"
    """headless: how often each candidate counts in the softmax. `paper`: as often as it is a target of the group;
    `once`: once; `corrected`: 1 / its probability of being a candidate (sampled softmax, whose scores after training
    are log-probabilities up to a constant, without an added bias); `own_once`: as the paper, but an output's own target
    counts once (no false negatives; an ablation)."""

    negatives: int = Field(default=0, ge=0)
    """headless: ids drawn in addition for each group, with replacement; they weigh as often as they are drawn."""

    negatives_from: Literal["unigram", "uniform"] = "unigram"
    """Where `negatives` are drawn from: the dataset's token frequencies, or all ids equally."""

    nearest: int = Field(default=0, ge=0)
    """bias: corrected: hard negatives; so many of each target's nearest ids are candidates too: those of the most
    alike embeddings in an earlier run, read from data.nearest_ids."""

    max_candidates: int | None = Field(default=None, gt=0)
    """headless: at most this many shared candidates, sampled by their weight and reweighted so that the sum over
    candidates is unbiased; an output's own target is always among its candidates. None: all."""

    vanilla_weight: float = Field(default=0.0, ge=0, lt=1)
    """headless: weight of an added vanilla loss (tied or not); the headless loss has weight 1 - this."""

    schedule: ObjectiveScheduleConfig | None = None
    """What is learned at first (`causal_share`: next tokens, by an encoder) or at last (`vanilla_share`: the vanilla
    softmax); if left out, it is the same throughout."""

    replaced_tokens: ReplacedTokensConfig | None = None
    """encoder: the objective is that of a small generator, and the model learns to tell the tokens that it has replaced
    (ELECTRA); left out, the model itself learns the masked tokens."""

    phrases: PhrasesConfig | None = None
    """encoder: phrases that several rows have are masked, and found in the other rows (NPM); left out, masked tokens
    are learned alone."""

    @field_validator("group_samples")
    @classmethod
    def _known_group(cls, value: int | str) -> int | str:
        if value not in GROUP_SHORTHANDS and (isinstance(value, str) or value < 1):
            raise ConfigError(
                "group_samples", f"be a positive number of samples or {', '.join(GROUP_SHORTHANDS)}", got=value
            )
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> ObjectiveConfig:
        if self.name == "vanilla":
            for field in (
                "group_samples",
                "bias",
                "negatives",
                "nearest",
                "max_candidates",
                "vanilla_weight",
            ):
                default, value = type(self).model_fields[field].default, getattr(self, field)
                if value != default:
                    raise ConfigError(field, "be left out of a vanilla objective", got=value, hint="use name: headless")
            if self.ends_vanilla():
                hint = "use name: headless"
                raise ConfigError(
                    "schedule.vanilla_share", "be left out of a vanilla objective", got="given", hint=hint
                )
        elif self.tied and self.vanilla_weight == 0 and not self.ends_vanilla():
            raise ConfigError("tied", "be left out of a headless objective without vanilla_weight", got=True)
        elif self.output_bias:
            raise ConfigError("output_bias", "be left out of a headless objective", got=True)
        if self.score == "harmonic" and self.learned_temperature:
            raise ConfigError("learned_temperature", "be left out with score: harmonic", got=True)
        if self.ends_vanilla() and self.vanilla_weight:
            rule = "be left out with vanilla_weight, whose head is trained from the beginning"
            raise ConfigError("schedule.vanilla_share", rule, got="given")
        if self.nearest and self.bias != "corrected":
            hint = "set objective.bias=corrected, which divides by it"
            rule = "be 0 unless bias accounts for how often an id is a candidate"
            raise ConfigError("nearest", rule, got=self.nearest, hint=hint)
        if self.negatives_from != "unigram" and self.negatives == 0:
            raise ConfigError(
                "negatives_from", "be left out without negatives", got=self.negatives_from, hint="set negatives"
            )
        for field in ("replaced_tokens", "schedule"):
            if self.phrases is not None and getattr(self, field) is not None:
                rule = "be left out with phrases, which the model itself learns from the first step to the last"
                raise ConfigError(field, rule, got="given")
        return self

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

    def ends_vanilla(self) -> bool:
        """Whether the run ends with the vanilla softmax by its `schedule`."""
        return self.schedule is not None and self.schedule.vanilla_share is not None

    def begun(self) -> ObjectiveConfig:
        """What a run with a `schedule` begins with."""
        unscheduled = self.model_copy(update={"schedule": None})
        return unscheduled.model_copy(update={"tied": False}) if self.ends_vanilla() else unscheduled

    def ended(self) -> ObjectiveConfig:
        """The vanilla softmax that a run with `schedule.vanilla_share` ends with."""
        kept = {name: getattr(self, name) for name in ("tied", "score", "temperature", "learned_temperature")}
        return ObjectiveConfig(name="vanilla", output_bias=True, **kept)

    def needs_token_counts(self) -> str | None:
        """The setting by which the dataset must have token counts; None where it need not."""
        if self.bias == "corrected":
            return "bias"
        if self.replaced_tokens is not None and self.replaced_tokens.draws == "vocabulary":
            return "replaced_tokens.draws"
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
    if stored is not None and samples != stored:
        raise ConfigError("objective.group_samples", f"stay what the run began with ({stored})", got=samples)
    if samples % batch.micro_size and batch.micro_size % samples:
        raise ConfigError(
            "objective.group_samples", f"divide batch.micro_size ({batch.micro_size}) or be a multiple", got=samples
        )
    if batch.global_size % samples:
        raise ConfigError("objective.group_samples", f"divide batch.global_size ({batch.global_size})", got=samples)
    return samples
