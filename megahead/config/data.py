"""The data of a run: which indexed datasets, how rows are cut from them, and how many make a batch."""

from __future__ import annotations

from math import gcd
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from megahead.config.base import Settings, refuse, require
from megahead.wording import pluralize

DATASET_FORMAT = "megahead-dataset/1"
"""Value of `format` in a dataset's `PREFIX.json`."""


class BlendPart(Settings):
    """One dataset of a blend."""

    prefix: str
    """Prefix of the dataset."""

    weight: float | None = Field(default=None, gt=0)
    """Share of the samples relative to the other datasets; by default the number of tokens."""


def _union_tag(train: Any) -> str:
    return "<blend>" if isinstance(train, (list, tuple)) else "<prefix>"


class DataConfig(Settings):
    """Indexed token files (`PREFIX.bin` + `PREFIX.idx`) and the rows cut from them. Prefixes and files may be URLs
    (`s3://BUCKET/text`), fetched to each node's disk first (docs/data.md)."""

    train: Annotated[
        Annotated[str, Tag("<prefix>")] | Annotated[list[BlendPart], Tag("<blend>")], Discriminator(_union_tag)
    ]
    """Prefix of the training dataset, or a list of {prefix, weight} to blend."""

    blend_temperature: float = Field(default=1.0, gt=0)
    """Blend weights are raised to 1 / this; above 1 favours small datasets (languages: 2 to 5)."""

    validation: str | None = None
    """Prefix of the held-out dataset; without it nothing is evaluated during training."""

    tokenizer: str | None = None
    """The `tokenizer.json` or SentencePiece `.model` of the text; by default the dataset's. Copied into the run folder
    and exports."""

    id_weights: str | None = None
    """A `.npy` file with a positive weight per id, for the masking strategy `weights`."""

    sequence_length: int = Field(gt=0)
    """Tokens per row (T); in a decoder each has a target."""

    order: Literal["shuffled", "stored"] = "shuffled"
    """`shuffled`: rows in a seeded random order, a new one each epoch; `stored`: the dataset's own sequences, in
    order (Pythia's preshuffled files)."""

    pack: Literal["stream", "best_fit"] = "stream"
    """`stream`: cut the text every T tokens; `best_fit`: pack whole documents into rows, cut only longer ones, pad the
    rest."""

    documents_a_row: int | None = Field(default=None, gt=0)
    """Most documents in a row under `best_fit`."""

    end_token: int = Field(default=0, ge=0)
    """Id that ends each document; by default the dataset's. Checked against the text."""

    isolate_documents: bool = True
    """Documents of a row do not attend to each other, and positions restart at each."""

    boundary_targets: bool = True
    """Also predict each document's first token from the preceding end token."""

    prefetch: int = Field(default=2, ge=0, le=1024)
    """Optimizer steps whose batches a background thread prepares ahead; 0: none."""

    read_ahead: Literal["rows", "system"] = "rows"
    """How shuffled rows are read: `rows` requests only them, a micro-batch at once; `system` leaves read-ahead to
    the kernel (try it on disks with slow requests)."""

    def parts(self) -> list[BlendPart]:
        """The training datasets; a single one if `train` is a prefix."""
        return [BlendPart.model_construct(prefix=self.train)] if isinstance(self.train, str) else list(self.train)

    @model_validator(mode="after")
    def _check_consistency(self) -> DataConfig:
        parts = self.parts()
        require(parts, "train", "name at least one dataset", got="an empty list")
        weights_agree = len({part.weight is None for part in parts}) == 1
        require(weights_agree, "train", "give every dataset a weight, or none", got="a mixture of both")
        stored, rule = self.order == "stored", "be `stream` with order: stored, whose rows are ready"
        require(not (stored and self.pack == "best_fit"), "pack", rule, got="`best_fit`")
        if self.pack != "best_fit":
            refuse("documents_a_row", self.documents_a_row, "unless pack is `best_fit`")
        return self


class BatchConfig(Settings):
    """Samples per optimizer step, and their split into micro-batches."""

    global_size: int = Field(gt=0, le=2**24)
    """Samples per optimizer step, over all data-parallel ranks."""

    micro_size: int = Field(gt=0)
    """Samples per forward pass on one rank; lower it if memory runs out."""

    def accumulation_steps(self, data_ranks: int, *, micro_groups: bool = False) -> int:
        """Micro-batches per optimizer step on each of `data_ranks` ranks. With `micro_groups` (a micro-batch is a
        candidate group) the error's hint keeps the groups."""
        per_pass = self.micro_size * data_ranks
        steps, remainder = divmod(self.global_size, per_pass)
        rule = f"be a multiple of micro_size x data ranks ({self.micro_size} x {data_ranks})"
        hint = "" if steps and not remainder else self._batch_size_hint(data_ranks, micro_groups)
        require(not hint, "batch.global_size", rule, got=self.global_size, hint=hint)
        return steps

    def _batch_size_hint(self, data_ranks: int, micro_groups: bool) -> str:
        """Suggests the largest micro-batch that keeps the global batch; if it cannot be split over all ranks, fewer
        ranks or the nearest global batches."""
        per_pass = self.micro_size * data_ranks
        below = self.global_size // per_pass * per_pass
        nearest_sizes = f"{below} or {below + per_pass}" if below else f"{per_pass}"
        if self.global_size % self.micro_size:
            return f"try {nearest_sizes}"
        ranks = max(n for n in range(1, min(data_ranks, self.global_size) + 1) if self.global_size % n == 0)
        micro = gcd(self.global_size // ranks, self.micro_size)
        fewer = pluralize(ranks, "data rank") if ranks < data_ranks else ""
        smaller = f"batch.micro_size={micro}" if micro < self.micro_size else ""
        if smaller and micro_groups:
            smaller += f" objective.group_samples={self.micro_size}"
        hint = f"try {' with '.join(filter(None, (fewer, smaller)))}, which keeps the recipe"
        return f"{hint}, or batch.global_size={nearest_sizes}" if fewer else hint

    def max_data_ranks(self, available: int) -> int:
        """The largest number of data ranks, at most `available`, that divides the global batch; 0 if none does."""
        micro_batches, remainder = divmod(self.global_size, self.micro_size)
        return 0 if remainder else max((d for d in range(1, available + 1) if micro_batches % d == 0), default=0)
