"""Settings of the optimizer, schedule, engine, training, resuming, faults, initial weights, tasks and parallelism."""

from __future__ import annotations

from math import gcd
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megahead.config.base import Settings, refuse, require
from megahead.config.model import ROBERTAS, ModelConfig
from megahead.remote_files import is_remote

UnitInterval = Annotated[float, Field(ge=0, lt=1)]


class TableConfig(Settings):
    """How the embedding and an untied head are updated."""

    rule: Literal["adamw", "adamw_row", "adagrad"] = "adamw"
    """`adamw`: like other weights. With a sharded embedding (`engine.embedding: rows`) also `adamw_row`, one second
    moment per row, a third lighter; `adagrad`, one sum of squares per row and no first moment, a third of the
    memory."""

    learning_rate_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of embedding and untied head, relative to other weights."""


class MuonConfig(Settings):
    """Muon does not use `betas` and `eps`."""

    momentum: UnitInterval = 0.95
    """Decay of the running mean of gradients (Nesterov)."""

    learning_rate_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of Muon's matrices relative to other weights. Updates have AdamW's size (Liu et al. 2025): start
    with 1."""


class OptimizerConfig(Settings):
    """AdamW, or Muon and AdamW; only matrices have weight decay."""

    name: Literal["adamw", "muon"] = "adamw"
    """`adamw`: all weights; `muon`: matrices of the blocks by Muon (Jordan et al. 2024), the others by AdamW
    (docs/optimizer.md)."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate."""

    betas: tuple[UnitInterval, UnitInterval] = (0.9, 0.95)
    """Decay of first and second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices."""

    gradient_clipping: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""

    muon: MuonConfig = MuonConfig()
    table: TableConfig = TableConfig()

    @model_validator(mode="after")
    def _check_muon(self) -> OptimizerConfig:
        used = self.name == "muon" or self.muon == MuonConfig()
        require(used, "muon", f"be left out with name: {self.name}", got="given", hint="set name: muon")
        return self


class ScheduleConfig(Settings):
    """Learning rate over optimizer steps, relative to the peak."""

    name: Literal["cosine", "triangular", "constant", "wsd"] = "cosine"
    """Shape after warm-up; `wsd`: warm-up, stable, decay."""

    warmup_steps: int | float = Field(default=0, ge=0)
    """Steps of linear warm-up, or below 1 their share of training.steps (0.01)."""

    final_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak at the last step (cosine, triangular, wsd)."""

    decay_steps: int | float | None = Field(default=None, gt=0)
    """wsd: steps of the final linear decay, or their share."""

    @field_validator("warmup_steps", "decay_steps")
    @classmethod
    def _check_steps_or_share(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is None or 0 < value < 1:
            return value
        rule = "be a whole number, or a share below 1 of training.steps"
        require(float(value).is_integer(), str(info.field_name), rule, got=value)
        return int(value)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Steps of warm-up in a run of `total_steps`."""
        return _resolve_steps(self.warmup_steps, total_steps)

    def num_decay_steps(self, total_steps: int) -> int:
        """Steps of the final decay in a run of `total_steps`, at least 1; 0 for other schedules than wsd."""
        return 0 if self.decay_steps is None else max(1, _resolve_steps(self.decay_steps, total_steps))

    def resolved_steps(self, total_steps: int) -> dict[str, int]:
        """{full name: steps} of the settings that may be shares, for comparing schedules."""
        warmup, decay = self.num_warmup_steps(total_steps), self.num_decay_steps(total_steps)
        return {"schedule.warmup_steps": warmup, "schedule.decay_steps": decay}

    @model_validator(mode="after")
    def _check_decay(self) -> ScheduleConfig:
        if self.name == "wsd":
            rule, hint = "be given for the wsd schedule", "try a tenth of all steps"
            require(self.decay_steps, "decay_steps", rule, got="missing", hint=hint)
        else:
            refuse("decay_steps", self.decay_steps, f"for the {self.name} schedule")
        return self


def _resolve_steps(steps_or_share: float, total_steps: int) -> int:
    return round(steps_or_share * total_steps) if isinstance(steps_or_share, float) else steps_or_share


DEFAULT_DEEPSPEED = {"zero_optimization": {"stage": 0}}
"""As `configs/deepspeed/zero0.json`: every rank has all weights."""


class EngineConfig(Settings):
    """DeepSpeed's settings, number format, attention, compilation, device."""

    deepspeed: str | dict[str, Any] = DEFAULT_DEEPSPEED
    """DeepSpeed's settings, or a JSON file searched for from the working directory, this config's folder and its
    parents, and the shipped `configs/deepspeed`. Batch sizes, clipping and precision come from this config;
    contradictions and unknown keys are refused. Communication settings (`reduce_bucket_size`, `overlap_comm`)
    default to values for the device; fp16's loss scale is set here (`fp16.initial_scale_power`)."""

    embedding: Literal["auto", "dense", "rows"] = "auto"
    """`dense`: a weight like others. `rows`: sharded over ranks; a step exchanges and updates only the rows it uses,
    with the same results (headless only, docs/large-vocabularies.md). `auto`: rows from 65,536 ids on or with another
    `optimizer.table.rule` than adamw, where possible."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Number format of forward and backward pass; updates are in fp32. `auto`: bf16 if all ranks have hardware for
    it (GPUs since Ampere, CPUs with AMX or AVX512-BF16), else fp32; a dry run counts it as fp32."""

    activation_checkpointing: bool | Literal["selective"] = False
    """Keeps only each block's input and recomputes the block in the backward pass: less memory, a third more time.
    `selective` also keeps matrix products and attention."""

    attention: Literal["auto", "flash2", "flash3", "flash4", "varlen", "sdpa", "documents"] = "auto"
    """flash-attn 2, 3 or 4; `varlen`, torch's kernel for packed sequences; `sdpa`, torch's
    scaled_dot_product_attention with a mask; `documents`, the same per document. `auto` takes the best that works."""

    compile: bool | Literal["auto"] = "auto"
    """Compiles the transformer block with `torch.compile`; on failure a line gives the reason, and blocks run
    uncompiled. `auto`: on CUDA only."""

    graphs: bool | Literal["auto"] = False
    """Captures forward and backward of a micro-batch as one CUDA graph, for small models, whose kernels the host
    launches too slowly. ZeRO 0, or 1 in bf16. `auto`: on CUDA only. No GPU has run it yet (docs/launching.md)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA if available."""

    deterministic: bool = False
    """Only deterministic algorithms (CPUs' always are): a resumed run on CUDA then equals an uninterrupted one bit for
    bit, but is slower."""

    timeout_seconds: float = Field(default=600, gt=0, le=1e7)
    """How long ranks wait for each other."""


class TrainingConfig(Settings):
    """How long to train; evaluations, checkpoints and logs."""

    steps: int = Field(gt=0)
    """Optimizer steps of the whole run."""

    max_seconds: float | None = Field(default=None, gt=0)
    """Evaluates, saves, stops after this many seconds of training."""

    log_seconds: float = Field(default=5.0, ge=0)
    """Seconds between lines of metrics.jsonl and of the console (ten times as many if redirected); 0: every
    step."""

    wandb: str | None = None
    """Project of Weights & Biases that receives curves (`pip install -e '.[wandb]'`)."""

    trackio: str | None = None
    """The same for a project of Trackio."""

    mlflow: str | None = None
    """The same for an experiment of MLflow."""

    evaluate_every: int = Field(default=500, gt=0)
    """Optimizer steps between evaluations; also at the end."""

    evaluate_samples: int = Field(default=64, gt=0)
    """Validation samples per evaluation, evenly spread."""

    checkpoint_every: int = Field(default=1000, gt=0)
    """Optimizer steps between checkpoints; also at the end."""

    keep_checkpoints: int = Field(default=2, gt=0)
    """Newest checkpoints kept on disk, and the last of each phase of an objective.schedule."""

    keep_every: int | None = Field(default=None, gt=0)
    """Checkpoints at multiples of this step are kept for good."""

    keep_best: int = Field(default=0, ge=0)
    """Also keeps this many checkpoints with the lowest held-out loss."""

    save_in_background: bool = False
    """Writes checkpoints from a copy in memory while training continues; the next save waits."""

    replicate_every: int | None = Field(default=None, gt=0)
    """Optimizer steps between in-memory replicas of the complete state, from which a run recovers when a node is lost
    (docs/nodes.md). /dev/shm takes up to four times a rank's share of the state for each rank."""

    remote_checkpoints: str | None = None
    """URL of a remote folder (`s3://BUCKET/runs/NAME`, any fsspec URL; `pip install -e '.[remote]'`) to which
    checkpoints, settings and log are uploaded in the background (docs/nodes.md)."""

    @model_validator(mode="after")
    def _check_consistency(self) -> TrainingConfig:
        url = self.remote_checkpoints
        rule = "be an address such as s3://BUCKET/FOLDER"
        require(url is None or is_remote(url), "remote_checkpoints", rule, got=repr(url))
        is_newer = self.replicate_every is None or self.replicate_every < self.checkpoint_every
        rule = f"be below training.checkpoint_every ({self.checkpoint_every})"
        hint = "a replica in memory is of use where it is newer than the checkpoint on disk"
        require(is_newer, "replicate_every", rule, got=self.replicate_every, hint=hint)
        return self

    def saves_elsewhere(self) -> bool:
        """Whether a run may resume without a checkpoint in its folder."""
        return not (self.remote_checkpoints is None and self.replicate_every is None)


class ResumeConfig(Settings):
    """How a resumed run may differ from its checkpoint's."""

    allow: tuple[str, ...] = ()
    """Settings that may differ although they change results: one (`optimizer.learning_rate`), a section
    (`schedule`), or a path whose files have changed (`data.train`)."""


class FaultsConfig(Settings):
    """When a step goes wrong `skip` keeps the weights and continues with the next samples, `rollback` first returns to
    the last checkpoint, `stop` ends the run."""

    bad_step: Literal["skip", "rollback", "stop"] = "skip"
    """When a loss or the gradient norm is not finite on any rank. (Overflows that only lower fp16's loss scale are
    always skipped.)"""

    spike: Literal["note", "skip", "rollback", "stop"] = "note"
    """When the loss is far above recent losses; `note` applies the step and prints a line."""

    spike_score: float = Field(default=8.0, gt=0)
    """Standard deviations above the median of recent losses that make a spike; estimated from the median absolute
    deviation, at least 1 % of the median."""

    spike_window: int = Field(default=128, ge=16)
    """Recent losses to compare with; detection starts after a quarter of them."""

    most_in_a_row: int = Field(default=20, gt=0)
    """The run ends after this many consecutive bad steps, or rollbacks to one checkpoint."""

    replicas: Literal["note", "rollback", "stop", "off"] = "stop"
    """When replicated weights differ between ranks, as after a memory fault. Checksums are compared every
    `replicas_every` steps and before checkpoints (docs/resilience.md)."""

    replicas_every: int = Field(default=100, gt=0)
    """Steps between comparisons of replicas."""

    slow_rank: float = Field(default=2.0, gt=1)
    """A line names a rank whose forward passes take this many times the others' median."""


class InitConfig(Settings):
    """Initial weights from a checkpoint or model."""

    from_checkpoint: str | None = None
    """A checkpoint, or a run folder for its newest one; or a URL of either. What an auxiliary objective adds, and the
    checkpoint lacks, starts as in a new run."""

    from_hf: str | None = None
    """A Hugging Face folder with safetensors of a model like `model`: body, embedding, and the head if the
    objective has one."""

    mode: Literal["continue", "table", "finetune", "probe"] = "finetune"
    """`finetune`: trains body and untied head, which starts as a copy of the embedding where there is none; `probe`:
    only that head; `continue`: the weights as they are, a new schedule; `table`: only the embedding and what the
    objective adds, for a new vocabulary."""

    @model_validator(mode="after")
    def _check_one_source(self) -> InitConfig:
        has_one = (self.from_checkpoint is None) != (self.from_hf is None)
        got = "missing" if self.from_hf is None else "given beside it"
        require(has_one, "from_checkpoint", "be given, or else from_hf", got=got)
        return self

    def copies_embedding(self) -> bool:
        """Whether a head that is not there is initialized with a copy of the embedding."""
        return self.mode in ("finetune", "probe")


class TasksConfig(Settings):
    """Tasks that are evaluated during training, on an export of the model."""

    names: tuple[str, ...] = Field(min_length=1)
    """Tasks as in `megahead eval-harness`; divided among ranks."""

    data: str | None = None
    """Folder of their published files; nothing is downloaded. Not needed if every task's file is given below."""

    cloze: str | None = None
    """A jsonl file of {"text"} for the task `cloze`: the last word is predicted."""

    text: str | None = None
    """Text, as for `megahead preprocess`, for the task `bits_per_byte`."""

    items: str | None = None
    """Prefix of a dataset of item sequences for the task `next_item` (docs/items.md)."""

    articles: str | None = None
    """A jsonl file of {"title", "text"} or {"query", "positive"}, or BEIR's folder, for the task `retrieval`
    (docs/evaluation.md)."""

    every: int = Field(gt=0)
    """Optimizer steps between evaluations, each with a checkpoint; also at the end."""

    limit: int | None = Field(default=None, gt=0)
    """Only the first examples of each task (`blimp`: of each paradigm). Ranks wait for the slowest, at most
    `engine.timeout_seconds`."""


class ParallelConfig(Settings):
    """The mesh: `tensor` ranks split one copy of the weights, data ranks split the batch."""

    tensor: int = Field(default=1, gt=0)
    """Tensor-parallel ranks, which split every layer; keep them within a node."""

    sequence: bool = False
    """Sequence parallelism as in Megatron: splits tokens over the tensor ranks where layers are not split (norms,
    dropout, block inputs). Less activation memory, equal traffic."""

    elastic: bool = False
    """Trains on as many of the launcher's ranks as the batch divides over; their number may change when ranks restart,
    with the same global batch and curve (docs/nodes.md)."""

    def check(self, model: ModelConfig, sequence_length: int) -> None:
        """Raises ConfigError unless `model` and its rows can be split evenly over tensor ranks."""
        widths = {
            "num_heads": model.num_heads,
            "intermediate_size": model.mlp_size(),
            "padded vocabulary": model.padded_vocab_size(),
        }
        for name, width in widths.items():
            rule = f"divide the model's {name} ({width})"
            require(width % self.tensor == 0, "parallel.tensor", rule, got=self.tensor)
        key_heads = model.key_heads()
        divisible = key_heads % self.tensor == 0 or self.tensor % key_heads == 0
        rule = f"divide the model's num_key_heads ({key_heads}), or be a multiple of it"
        require(divisible, "parallel.tensor", rule, got=self.tensor)
        # their blocks cannot split tokens
        refused = self.sequence and self.tensor > 1 and model.family in ("bert", *ROBERTAS)
        require(not refused, "parallel.sequence", f"be false for model.family {model.family}", got="true")
        divisible = not self.sequence or sequence_length % self.tensor == 0
        rule = f"be a multiple of parallel.tensor ({self.tensor}) under parallel.sequence"
        require(divisible, "data.sequence_length", rule, got=sequence_length)

    def data_ranks(self, world_size: int) -> int:
        """Number of data-parallel ranks among `world_size` ranks."""
        ranks, remainder = divmod(world_size, self.tensor)
        rule = f"divide the number of ranks ({world_size})"
        hint = f"try {max(ranks, 1) * self.tensor} ranks, or parallel.tensor={gcd(self.tensor, world_size)}"
        require(ranks > 0 and not remainder, "parallel.tensor", rule, got=self.tensor, hint=hint)
        return ranks
