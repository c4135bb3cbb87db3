"""What a run learns: headless or vanilla, a schedule of both, replaced-token detection, phrases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megahead.config.base import Settings
from megahead.config.data import BatchConfig
from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.errors import ConfigError

# Which objective a run begins and ends with, where that changes on the way.


class ObjectiveScheduleConfig(Settings):
    """A run whose objective changes on the way: one set of weights, one state of the optimizer, one learning rate's
    course. With both shares there are two switches."""

    causal_share: float | None = Field(default=None, gt=0, lt=1)
    """encoder: share of training.steps, the first ones, in which it learns as a decoder does, next tokens by causal
    attention; it learns masked tokens in the others, and is an encoder at the end (CLM, then MLM: Gisserot-Boukhlef et
    al. 2025, arXiv 2507.00994)."""

    vanilla_share: float | None = Field(default=None, gt=0, lt=1)
    """headless: share of training.steps, the last ones, with the softmax over the whole vocabulary as objective: a
    trained head at a part of its cost. It starts as the training-free head, so that the loss does not jump: the
    embedding itself (`objective.tied`) or a copy of it, and a bias for each token. The optimizer's state is kept; from
    then on evaluations and exports are those of a vanilla model."""

    @model_validator(mode="after")
    def _has_a_switch(self) -> ObjectiveScheduleConfig:
        if self.causal_share is None and self.vanilla_share is None:
            raise ConfigError("causal_share", "be given, or vanilla_share", got="missing", hint="or leave schedule out")
        return self

    def causal_until(self, steps: int) -> int:
        """How many of a run's `steps` are causal because of the schedule."""
        return 0 if self.causal_share is None else round(self.causal_share * steps)

    def vanilla_from(self, steps: int) -> int:
        """How many of a run's `steps` come before the vanilla softmax; all without it."""
        return steps if self.vanilla_share is None else steps - round(self.vanilla_share * steps)

    def check(self, steps: int) -> None:
        """ConfigError unless each objective has a step."""
        switches = {"causal_share": self.causal_until(steps), "vanilla_share": self.vanilla_from(steps)}
        for name, switch in switches.items():
            share = getattr(self, name)
            if share is not None and not 0 < switch < steps:
                rule = f"leave both objectives a step of training.steps ({steps})"
                raise ConfigError(f"objective.schedule.{name}", rule, got=share)


# How many outputs' scores the softmax holds at once; `objectives` computes and `estimate` predicts memory with it.


@dataclass(frozen=True)
class ChunkSize:
    """How the outputs of a loss are cut into chunks."""

    score_bytes: int
    """Bytes of the scores that are held at once."""

    least_outputs: int
    """Outputs that a chunk may have however many candidates there are: each further chunk costs a pass over the
    gradient of all rows."""

    multiple: int
    """Outputs in a chunk are a multiple of this, unless there are fewer."""

    def outputs(self, total: int, candidates: int, score_size: int) -> int:
        """Outputs per chunk, of `total` outputs with this many candidates and scores of `score_size` bytes: equal
        chunks, no more of them than needed."""
        fitting = self.score_bytes // (candidates * score_size) // self.multiple * self.multiple
        chunks = math.ceil(total / max(self.least_outputs, fitting))
        return min(total, math.ceil(total / chunks / self.multiple) * self.multiple)


ON_CPU = ChunkSize(score_bytes=8 * 2**20, least_outputs=256, multiple=1)
"""Small beside the gradients, large enough that each chunk's products run at full speed (measured on one core, 16,384 x
4,300 x 512: the same from 2 to 32 MiB, and no slower than the three products alone; with 50,304 candidates 256 outputs
are 1.7 times as fast as 41)."""

ON_GPU = ChunkSize(score_bytes=128 * 2**20, least_outputs=1024, multiple=128)
"""float32 scores and half-precision residuals, 192 MiB together: so many, of 512 features, take an H100 0.34 ms or more
(computed); to ask for a chunk's kernels took an H200's host 0.14 to 0.25 ms (measured). With fewer than 1,024 outputs,
adding to the rows' gradient is bound by memory: 8 bytes moved for 2 n operations, n outputs. Products compute 128
outputs at a time."""


# Replaced-token detection: an encoder learns which tokens a small generator has put in place of masked ones.


class ReplacedTokensConfig(Settings):
    """ELECTRA (Clark et al. 2020, arXiv 2003.10555): a generator learns the masked tokens by the run's objective,
    tokens drawn from it take their places, and the run's model learns of each token whether it is the text's."""

    generator_layers: int = Field(default=1, gt=0)
    """Blocks of the generator, of the model's width and kind (as in COCO-LM, arXiv 2102.08473); it reads the model's
    input embedding."""

    draws: Literal["group", "vocabulary"] = "group"
    """headless: what tokens are drawn from. `group`: the candidates of their group, which costs next to nothing;
    `vocabulary`: all ids, exactly by the training-free head with the dataset's token counts, which costs the product of
    the masked tokens' outputs and the whole embedding."""

    weight: float = Field(default=50.0, gt=0)
    """Weight of the detection's loss, a mean over all tokens but special ones; the generator's has 1."""


# Phrases as candidates: an encoder finds its masked phrases in the other rows of a group.


class PhrasesConfig(Settings):
    """After NPM (Min et al. 2023, arXiv 2212.01349): phrases that another row has too are masked, and the outputs at
    both ends of each are learned to be like those where the same phrase stands in other rows, and unlike all others.
    The objective learns the masked tokens beside that."""

    weight: float = Field(default=1.0, gt=0)
    """How often the loss at each end of a masked phrase counts; that of a masked token counts once."""

    shortest: int = Field(default=2, ge=2)
    """Smallest number of tokens in a phrase."""

    longest: int = Field(default=10, ge=2)
    """Largest number of tokens in a phrase; the paper has 10."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """How much the tokens of such phrases weigh in the draw of a row's masked tokens, all others weigh the rest, by
    masking.strategy: about their share of the masked tokens, where a row has so many."""

    group_samples: int = Field(default=32, ge=2)
    """Consecutive samples whose rows are searched for each other's phrases, a divisor of batch.micro_size. More rows
    share more phrases, and have more tokens to tell from these."""

    temperature: float | None = Field(default=None, gt=0)
    """Products of outputs are divided by this; the root of model.hidden_size (the paper) when left out."""

    @model_validator(mode="after")
    def _some_length(self) -> PhrasesConfig:
        if self.longest < self.shortest:
            raise ConfigError("longest", f"be at least shortest ({self.shortest})", got=self.longest)
        return self

    def check(self, model: ModelConfig, masking: MaskingConfig | None, batch: BatchConfig) -> None:
        """ConfigError unless whole phrases can be masked, and each rank has whole groups."""
        if masking is None or model.is_causal:
            rule = "be left out where next tokens are learned: phrases are masked in an encoder's rows"
            raise ConfigError("objective.phrases", rule, got="given")
        if masking.diffusion:
            raise ConfigError(
                "masking.diffusion", "be left out with objective.phrases, which are masked whole", got=True
            )
        if batch.micro_size % self.group_samples:
            rule = f"divide batch.micro_size ({batch.micro_size})"
            raise ConfigError("objective.phrases.group_samples", rule, got=self.group_samples)


# The objective: pick each output's target among the targets of a candidate group (headless: contrastive weight tying),
# or among the whole vocabulary (vanilla).


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
