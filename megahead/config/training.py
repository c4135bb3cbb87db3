"""How weights are updated and for how long: optimizer, schedule, engine (DeepSpeed), and the training around them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.errors import ConfigError
from megahead.far.address import is_far

Fraction = Annotated[float, Field(ge=0, lt=1)]


class TableConfig(Settings):
    """How the embedding is updated, and an untied head with it."""

    rule: Literal["adamw", "adamw_row", "adagrad"] = "adamw"
    """`adamw`: as all other weights. Under `engine.embedding: rows` also `adamw_row`: with one running square a row
    instead of one a weight, a third lighter; `adagrad`: one sum of squares a row and no running mean, a third of the
    memory."""

    learning_rate_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of the embedding, and of an untied head, over that of all other weights."""


class MuonConfig(Settings):
    """Settings of Muon alone; `betas` and `eps` are AdamW's, which it does not use."""

    momentum: Fraction = 0.95
    """Decay of the running mean of gradients; Nesterov's variant of it is made orthogonal."""

    learning_rate_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of Muon's matrices over that of all other weights. Updates are scaled by 0.2 times the root of a
    matrix's longer side, which makes them about as large as AdamW's (Liu et al. 2025), so start with 1."""


class OptimizerConfig(Settings):
    """AdamW, or Muon and AdamW; weight decay acts on matrices only, never on norms and biases."""

    name: Literal["adamw", "muon"] = "adamw"
    """`adamw`: for all weights; `muon`: for the matrices of the blocks, whose momentum is made orthogonal (Jordan et
    al. 2024), and AdamW for all other weights, such as embedding and head. Updates are those of whole matrices on every
    mesh and at every ZeRO stage, for which each step gathers 2 bytes for each of their numbers."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the running mean and of the running square of gradients."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the running square."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices."""

    gradient_clipping: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off."""

    muon: MuonConfig = MuonConfig()
    table: TableConfig = TableConfig()

    @model_validator(mode="after")
    def _muon_is_used(self) -> OptimizerConfig:
        if self.name != "muon" and self.muon != MuonConfig():
            raise ConfigError("muon", f"be left out with name: {self.name}", got="given", hint="set name: muon")
        return self


class ScheduleConfig(Settings):
    """Learning rate over optimizer steps, as a share of the peak."""

    name: Literal["cosine", "triangular", "constant", "wsd"] = "cosine"
    """Shape after warm-up; `wsd` is warm-up, stable, decay."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear growth from 0 to the peak."""

    final_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak at the last step (cosine, triangular, wsd)."""

    decay_steps: int | None = Field(default=None, gt=0)
    """wsd only: steps of the closing linear decay."""

    @model_validator(mode="after")
    def _decay_belongs_to_wsd(self) -> ScheduleConfig:
        if self.name == "wsd" and self.decay_steps is None:
            raise ConfigError(
                "decay_steps", "be given for the wsd schedule", got="missing", hint="try a tenth of all steps"
            )
        if self.name != "wsd" and self.decay_steps is not None:
            raise ConfigError("decay_steps", f"be left out for the {self.name} schedule", got=self.decay_steps)
        return self


REPLICATED = {"zero_optimization": {"stage": 0}}
"""DeepSpeed's settings if none are given, those of `configs/deepspeed/zero0.json`: every rank has all weights."""


class EngineConfig(Settings):
    """How a step is computed: DeepSpeed's settings, number format, attention, compilation, device."""

    deepspeed: str | dict[str, Any] = REPLICATED
    """DeepSpeed's settings, or a JSON file that holds them: looked for from the working directory, then from this
    config's folder and those above it, then among those that ship (`configs/deepspeed/zero1.json`). Batch sizes,
    clipping and precision are added from this config; what contradicts them is refused, and keys that a run does not
    use. How gradients are bundled and sent is chosen for the device where it is left out there (`reduce_bucket_size`,
    `overlap_comm`, ...). fp16's search for a loss scale is set there (`fp16.initial_scale_power`)."""

    embedding: Literal["auto", "dense", "rows"] = "auto"
    """Where the embedding lies. `dense`: it is a weight like all others. `rows`: its rows are sharded round-robin over
    all ranks, and a step fetches, sends and updates only those it uses: its cost does not depend on the vocabulary.
    Training is the same; for headless objectives only. `auto` takes rows from 65,536 ids on, or where
    `optimizer.table.rule` is not adamw, and dense where rows cannot be."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Number format of the forward and backward passes; weights are always updated in fp32. `auto` takes bf16 if all
    ranks have hardware for it (GPUs since Ampere, CPUs with AMX or AVX512-BF16), else fp32; while that is not known, as
    in a dry run, it counts as fp32."""

    activation_checkpointing: bool | Literal["selective"] = False
    """Keep only each block's input for the backward pass and recompute the block there: less memory, a third more time.
    `selective` also keeps the results of matrix products and attention, and recomputes only what is cheap."""

    attention: Literal["auto", "flash2", "flash3", "flash4", "varlen", "sdpa", "documents"] = "auto"
    """How attention is computed: flash-attn 2, 3 or 4; `varlen`, torch's kernel for sequences of different lengths;
    `sdpa`, torch's scaled_dot_product_attention with a mask; `documents`, the same document by document. `auto` takes
    the best of those that work for the run."""

    compile: bool | Literal["auto"] = "auto"
    """Compile the transformer block with `torch.compile`, once for all layers; if that is not possible, a line gives
    the reason and blocks run uncompiled. Takes from seconds to minutes at the start. `auto` compiles on CUDA only."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; `auto` takes CUDA if there is a device."""

    deterministic: bool = False
    """Only algorithms that give the same bits each time: a run that is resumed on CUDA then equals an uninterrupted
    one, but is slower. On CPUs a run is deterministic anyway."""

    timeout_seconds: float = Field(default=600, gt=0, le=1e7)
    """How long ranks wait for each other before they give up."""


class TrainingConfig(Settings):
    """How long to train, and what to evaluate, save and log meanwhile."""

    steps: int = Field(gt=0)
    """Optimizer steps of the whole run."""

    max_seconds: float | None = Field(default=None, gt=0)
    """Stop (saved, evaluated) after this many seconds of training, whatever the step."""

    log_seconds: float = Field(default=5.0, ge=0)
    """Seconds between lines of metrics.jsonl and of the console, ten times as many where that is a file or a pipe; 0
    writes every step."""

    wandb: str | None = None
    """Project of Weights & Biases that curves go to as well (`pip install -e '.[wandb]'`); none when left out."""

    evaluate_every: int = Field(default=500, gt=0)
    """Optimizer steps between evaluations; also evaluated at the end."""

    evaluate_samples: int = Field(default=64, gt=0)
    """Samples of the validation dataset that an evaluation reads, evenly spread over it."""

    checkpoint_every: int = Field(default=1000, gt=0)
    """Optimizer steps between checkpoints; also saved at the end."""

    keep_checkpoints: int = Field(default=2, gt=0)
    """Newest checkpoints kept on disk, of those that led to the run's weights; the last one of each phase of an
    objective.schedule is kept, too."""

    keep_every: int | None = Field(default=None, gt=0)
    """Checkpoints whose step is a multiple of this are kept for good."""

    keep_best: int = Field(default=0, ge=0)
    """This many checkpoints with the lowest held-out loss at their step are kept too."""

    save_in_background: bool = False
    """Continue training while a checkpoint is written, which takes a copy in memory; the next save waits for it."""

    copy_every: int | None = Field(default=None, gt=0)
    """Optimizer steps between copies of the complete state in the memory of the nodes (/dev/shm), of each rank's share
    one on its own node and one on the next: what a lost node costs are the steps since the last of them. Takes up to
    four shares of memory a rank, and as long as copying one; none when left out (docs/nodes.md)."""

    mirror: str | None = None
    """A folder in an object store, or any other URL that fsspec knows (`s3://BUCKET/runs/NAME`; `pip install -e
    '.[far]'`), to which finished checkpoints, settings and log are copied in the background, and from which a run goes
    on whose disk is empty; of checkpoints it keeps the same as the disk. None when left out (docs/nodes.md)."""

    @model_validator(mode="after")
    def _mirror_is_an_address(self) -> TrainingConfig:
        if self.mirror is not None and not is_far(self.mirror):
            raise ConfigError("mirror", "be an address such as s3://BUCKET/FOLDER", got=repr(self.mirror))
        return self

    @model_validator(mode="after")
    def _copies_are_newer_than_checkpoints(self) -> TrainingConfig:
        if self.copy_every is not None and self.copy_every >= self.checkpoint_every:
            rule = f"be below training.checkpoint_every ({self.checkpoint_every})"
            hint = "a copy in memory is of use where it is newer than the disk's"
            raise ConfigError("copy_every", rule, got=self.copy_every, hint=hint)
        return self
