"""How weights are updated, for how long, from which first weights, on which ranks; faults, resuming, tasks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megahead.config.base import Settings
from megahead.config.model import ModelConfig
from megahead.errors import ConfigError
from megahead.remote_files import is_far

# How weights are updated and for how long: optimizer, schedule, engine (DeepSpeed), and the training around them.


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


# What a run does when a step goes wrong, and which settings may change when it is resumed.


Policy = Literal["skip", "rollback", "stop"]


class ResumeConfig(Settings):
    """How far a resumed run may differ from the one that wrote its checkpoint."""

    allow: tuple[str, ...] = ()
    """Settings that may differ although they change the result: one setting (`optimizer.learning_rate`), a whole
    section (`schedule`), or a path whose files have changed (`data.train`, `data.tokenizer`)."""


class FaultsConfig(Settings):
    """Steps that go wrong. `skip` leaves the weights as they are and continues with the next samples, `rollback`
    returns to the weights of the last checkpoint and continues with the next samples, `stop` ends the run."""

    bad_step: Policy = "skip"
    """When a loss or the gradient norm is not finite on any rank. (An overflow that only lowers fp16's loss scale is
    always skipped.)"""

    spike: Literal["note", "skip", "rollback", "stop"] = "note"
    """When the loss is far above recent losses; `note` applies the step and prints a line."""

    spike_score: float = Field(default=8.0, gt=0)
    """A loss is a spike when it is this many standard deviations above the median of recent losses. The standard
    deviation is estimated from the median absolute deviation, and is at least 1 % of the median."""

    spike_window: int = Field(default=128, ge=16)
    """How many recent losses a loss is compared with. Detection starts once a quarter of that number is recorded."""

    most_in_a_row: int = Field(default=20, gt=0)
    """The run ends after this many bad steps in a row, or this many rollbacks to the same checkpoint."""

    replicas: Literal["note", "rollback", "stop", "off"] = "stop"
    """When weights that several ranks hold are not the same bits on all, as after a fault in memory. Checksums of them
    are compared every `replicas_every` steps and before each checkpoint; `off` compares nothing. After `stop`, the next
    start resumes from a checkpoint that agreed. At ZeRO 1 and 2 each step renews replicas from their owners, so that
    only the last step's faults are seen; at ZeRO 3, and on one data rank, there are no replicas."""

    replicas_every: int = Field(default=100, gt=0)
    """Steps between comparisons of replicas."""

    slow_rank: float = Field(default=2.0, gt=1)
    """A line names a rank whose forward passes take this many times as long as the median of the others'."""


# Where a run gets its first weights from, if not at random.


class InitConfig(Settings):
    """Weights to start from, instead of random ones."""

    from_checkpoint: str | None = None
    """A checkpoint of megahead, or a run folder, whose newest checkpoint is taken; or the URL of one."""

    from_hf: str | None = None
    """Instead of a checkpoint, a Hugging Face folder with the safetensors of a model like `model`: its body and
    embedding are taken, and its head if the objective has one."""

    mode: Literal["continue", "table", "finetune", "probe"] = "finetune"
    """`finetune`: train an untied head, started as a copy of the embedding, with the body; `probe`: that head alone,
    the body frozen; `continue`: the weights as they are, a new schedule; `table`: the same, of which only the embedding
    is trained (and what the objective has beside the body), for another vocabulary."""

    @model_validator(mode="after")
    def _one_source(self) -> InitConfig:
        if (self.from_checkpoint is None) == (self.from_hf is None):
            given = "missing" if self.from_hf is None else "given beside it"
            raise ConfigError("from_checkpoint", "be given, or else from_hf", got=given)
        return self

    def copies_embedding(self) -> bool:
        """Whether a head starts as a copy of the embedding, and not as it was."""
        return self.mode in ("finetune", "probe")


# Evaluation of tasks during training.


class TasksConfig(Settings):
    """Tasks that are evaluated every `every` steps, on an export of the current model."""

    names: tuple[str, ...] = Field(min_length=1)
    """Tasks as `megahead eval-harness` knows them; they are divided among all ranks."""

    data: str | None = None
    """Folder of their files, as published; nothing is downloaded. Not needed if every task has its file given below."""

    cloze: str | None = None
    """A jsonl of {"text"} for the task `cloze`: the last word of each is predicted."""

    text: str | None = None
    """Text, as `megahead preprocess` takes it, for the task `bits_per_byte`."""

    every: int = Field(gt=0)
    """Optimizer steps between evaluations, each on an export of a checkpoint saved for it; also at the end."""

    limit: int | None = Field(default=None, gt=0)
    """Only this many first examples of each task (`blimp`: of each paradigm); all when left out. Ranks that are done
    wait for the slowest, at most `engine.timeout_seconds`."""


# How a model is split over ranks.


class ParallelConfig(Settings):
    """The mesh: a copy of the weights is split over `tensor` ranks, a batch over the copies (the data ranks)."""

    tensor: int = Field(default=1, gt=0)
    """Tensor-parallel ranks, which split every layer among them; keep them within a node."""

    sequence: bool = False
    """Sequence parallelism as in Megatron: where layers are not split (norms, dropout, the inputs of blocks), split the
    tokens of each row over the tensor ranks. Less memory for activations, the same traffic; no effect with `tensor: 1`.
    """

    elastic: bool = False
    """Train on as many of the launcher's ranks as the batch can be split over, whose number may change whenever ranks
    meet again: global batch, objective and curve stay. Ranks beyond wait until the others end. It is torchrun's agents
    that start lost nodes' work again (docs/nodes.md); under other launchers the next start takes what is there."""

    def check(self, model: ModelConfig, sequence_length: int) -> None:
        """Raises ConfigError when `model`, or its rows, cannot be split evenly."""
        widths = {
            "num_heads": model.num_heads,
            "intermediate_size": model.mlp_size(),
            "padded vocabulary": model.padded_vocab_size(),
        }
        for name, width in widths.items():
            if width % self.tensor:
                raise ConfigError("parallel.tensor", f"divide the model's {name} ({width})", got=self.tensor)
        keys = model.key_heads()
        if keys % self.tensor and self.tensor % keys:
            rule = f"divide the model's num_key_heads ({keys}), or be a multiple of it"
            raise ConfigError("parallel.tensor", rule, got=self.tensor)
        if self.sequence and sequence_length % self.tensor:
            raise ConfigError(
                "data.sequence_length",
                f"be a multiple of parallel.tensor ({self.tensor}) under parallel.sequence",
                got=sequence_length,
            )

    def data_ranks(self, world_size: int) -> int:
        """Data-parallel ranks among `world_size` ranks."""
        ranks, remainder = divmod(world_size, self.tensor)
        if remainder or ranks < 1:
            raise ConfigError("parallel.tensor", f"divide the number of ranks ({world_size})", got=self.tensor)
        return ranks
