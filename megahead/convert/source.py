"""A trained model on disk: a checkpoint's parameters, by their names in the `Pretraining`, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megahead.checkpoint import Checkpoint, open_checkpoint, target_samples
from megahead.config import HeadName, RunConfig, config_from_checkpoint
from megahead.data import evaluation_target_counts
from megahead.distributed import Finite, Group, Renamed
from megahead.errors import CheckpointError
from megahead.objectives import training_free_bias
from megahead.parallel import assemble, fill_
from megahead.pretraining import TEMPERATURE, Pretraining, weight_shapes
from megahead.run_folder import RunFolder

BACKBONE = "backbone."
EMBEDDING = "backbone.embedding.weight"
HEAD = "head.weight"
MASK_HEAD = "mask_head."
OUTPUT_BIAS = "output_bias.bias"
TARGET_COUNTS = "state/target_counts"
_PRIOR = "state/dataset_counts"


@dataclass(frozen=True)
class TrainedModel:
    """An open checkpoint and the run's config; nothing is loaded until asked for."""

    checkpoint: Checkpoint
    config: RunConfig
    shapes: Mapping[str, torch.Size]
    """Shapes of all parameters, by their names in the `Pretraining`."""

    @staticmethod
    def open(path: Path) -> TrainedModel:
        """The model of a step folder, or the newest of a run; CheckpointError when it lacks a parameter, or has
        another shape for it than its config."""
        return TrainedModel.of(open_checkpoint(path))

    @staticmethod
    def of(checkpoint: Checkpoint) -> TrainedModel:
        """The model in a checkpoint; as `open`."""
        config = config_from_checkpoint(checkpoint.config, source=f"the configuration in {checkpoint.folder}")
        shapes = weight_shapes(config)
        stored = set(checkpoint.names())
        for name, shape in shapes.items():
            if f"weight/{name}" not in stored:
                raise CheckpointError(f"`{checkpoint.folder}` must hold the parameter {name}, but lacks it.")
            held = checkpoint.shape(f"weight/{name}")
            if held != shape:
                raise CheckpointError(
                    f"`{checkpoint.folder}` must hold {name} as {list(shape)}, but holds {list(held)} instead."
                )
        return TrainedModel(checkpoint, config, shapes)

    def used(self) -> TrainedModel:
        """What is left of it after training: all but a decoder that alone sees mask tokens."""
        masking = self.config.masking
        if masking is None or not masking.mask_decoder_layers:
            return self
        config = self.config.model_copy(update={"masking": masking.model_copy(update={"mask_decoder_layers": 0})})
        return replace(self, config=config, shapes=weight_shapes(config))

    def weight(self, name: str) -> Tensor:
        """One full parameter in fp32; CheckpointError unless it is finite."""
        return self._weights().read(name).float()

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The same in consecutive blocks of rows; memory holds one of them."""
        return (block.float() for block in self._weights().blocks(name))

    def _weights(self) -> Finite:
        return Finite(Renamed(self.checkpoint, lambda name: f"weight/{name}"), self.checkpoint.folder)

    def bias(self, head: HeadName) -> Tensor | None:
        """[V] fp32: what a head of this name adds to `E h / T`; None if nothing. CheckpointError where counts that the
        training-free one needs were not kept."""
        if head != "pmi":
            return self.learned_bias()
        if not self.has_target_counts():
            raise CheckpointError(
                f"`{self.checkpoint.folder}` must hold the counts of its training targets for --head pmi, "
                "but lacks them; export with --head tied or none."
            )
        return self.training_free_bias()

    def has_target_counts(self) -> bool:
        """Whether the run counted its targets, which the training-free head needs."""
        return TARGET_COUNTS in self.checkpoint.names()

    def target_counts(self) -> Tensor:
        """[padded V] int64, where they were counted."""
        return self.checkpoint.read(TARGET_COUNTS)

    def dataset_counts(self) -> Tensor | None:
        """[padded V] int64: how often each id occurs in the training text; None if that is not known."""
        return self.checkpoint.read(_PRIOR) if _PRIOR in self.checkpoint.names() else None

    def training_free_bias(self) -> Tensor:
        """[V] fp32: the bias that turns `E h / T` into log p. For the paper's objective log q: q the distribution of
        the targets trained on, or of the text's tokens if rare ones were masked more often."""
        model, token_counts_V, counts_V = self.config.model, self.dataset_counts(), self.target_counts()
        bias_V = training_free_bias(
            self.config.objective,
            model.vocab_size,
            counts_V,
            token_counts_V,
            self._group_targets(),
            evaluation_target_counts(self.config, token_counts_V),
        )
        return torch.zeros(model.vocab_size) if bias_V is None else bias_V

    def learned_bias(self) -> Tensor | None:
        """[V] fp32: the bias of a trained head; None where there is none."""
        name = next((name for name in (f"{MASK_HEAD}bias", OUTPUT_BIAS) if name in self.shapes), None)
        return None if name is None else self.weight(name)[: self.config.model.vocab_size]

    def temperature(self) -> float:
        """What scores are divided by."""
        objective = self.config.objective
        return self.weight(TEMPERATURE).exp().item() if objective.learned_temperature else objective.temperature

    def _group_targets(self) -> float:
        """Mean number of targets in a group over the run; expected from its settings if none were counted."""
        state, config = self.checkpoint.state, self.config
        samples = target_samples(self.checkpoint)
        per_sample = state.get("targets", 0) / max(samples, 1) or config.targets_per_row()
        return float(per_sample * state.get("group_samples", config.batch.micro_size))

    def load(self) -> Pretraining:
        """The model itself, in fp32 on the CPU, ready to score."""
        pretraining = assemble(self.config, Group(), torch.device("cpu"))
        fill_(pretraining, Group(), self._weights())
        return pretraining.eval()

    def load_streaming(self, dtype: torch.dtype) -> Pretraining:
        """The model itself, on the CPU in `dtype`, whose modules read their weights each time they are called.

        Memory holds the weights of one module at a time, of the embedding a block; a matrix that is never called stays
        on `meta`.
        """
        pretraining = assemble(self.config, Group(), torch.device("meta"))
        pretraining.backbone.register_module("embedding", _StreamedEmbedding(self, dtype))
        for prefix, module in pretraining.named_modules():
            names = [name for name, _ in module.named_parameters(recurse=False)]
            if names:
                module.register_forward_pre_hook(partial(self._fill, prefix, names, dtype))
                module.register_forward_hook(partial(_empty, names))
        return pretraining.eval()

    def _fill(self, prefix: str, names: Sequence[str], dtype: torch.dtype, module: nn.Module, _inputs: Any) -> None:
        for name in names:
            weight = self.weight(f"{prefix}.{name}").to(dtype)
            module.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def tokenizer(self) -> Path | None:
        """The tokenizer's file of the run: its copy in the run folder, or the file the config names."""
        named = self.config.data.tokenizer
        places = [self.run_folder().tokenizer, *([Path(named)] if named else [])]
        return next((path for path in places if path.is_file()), None)

    def tokenizer_mark(self) -> str | None:
        """By which the run's tokenizer is known again (`corpus.tokenizer.has_mark`); None where it was not noted."""
        mark: str | None = self.checkpoint.state_value("texts", dict, absent={}).get("data.tokenizer")
        return mark

    def run_folder(self) -> RunFolder:
        """The folder of the run that was trained."""
        return RunFolder.of(self.checkpoint.folder)


class _StreamedEmbedding(nn.Module):
    """Looks rows up while it reads the table past them."""

    def __init__(self, model: TrainedModel, dtype: torch.dtype) -> None:
        super().__init__()
        self._model, self._dtype = model, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[..., D]: the rows of `ids`."""
        rows, first = torch.empty(*ids.shape, self._model.config.model.hidden_size, dtype=self._dtype), 0
        for block in self._model.blocks(EMBEDDING):
            inside = (ids >= first) & (ids < first + len(block))
            rows[inside] = block[ids[inside] - first].to(self._dtype)
            first += len(block)
        return rows


def _empty(names: Sequence[str], module: nn.Module, _inputs: Any, _output: Any) -> None:
    for name in names:
        weight = module.get_parameter(name)
        module.register_parameter(name, nn.Parameter(weight.to("meta"), requires_grad=False))
