"""A trained model in a checkpoint: its parameters, read one at a time, and facts about its training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megahead.checkpoints.reading import Checkpoint, open_checkpoint, target_samples
from megahead.config.objective import HeadName
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import FiniteTensors, MappedTensors
from megahead.errors import CheckpointError
from megahead.losses.candidates import evaluation_target_counts, training_free_bias
from megahead.objectives.pretraining import TEMPERATURE, Pretraining, build_parallel_model, load_weights_
from megahead.run_folder import RunFolder

BACKBONE = "backbone."
EMBEDDING = "backbone.embedding.weight"
HEAD = "head.weight"
MASK_HEAD = "mask_head."
OUTPUT_BIAS = "output_bias.bias"
POSITIONS = "backbone.positions.weight"
TARGET_COUNTS = "state/target_counts"
_DATASET_COUNTS = "state/dataset_counts"


@dataclass(frozen=True)
class TrainedModel:
    """An open checkpoint and the run's config; weights are read on demand."""

    checkpoint: Checkpoint
    config: RunConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all parameters in the checkpoint, by their names in the `Pretraining`."""

    @staticmethod
    def open(path: Path) -> TrainedModel:
        """Opens the model of a step folder, or the newest of a run."""
        return TrainedModel.from_checkpoint(open_checkpoint(path))

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> TrainedModel:
        """Returns the model in an open checkpoint."""
        names = [name.removeprefix("weight/") for name in checkpoint.names() if name.startswith("weight/")]
        shapes = {name: checkpoint.shape(f"weight/{name}") for name in names}
        return TrainedModel(checkpoint, checkpoint.run_config(), shapes)

    def without_mask_decoder(self) -> TrainedModel:
        """Returns the part that is used after training: all layers but those of `mask_decoder_layers`."""
        masking = self.config.masking
        if masking is None or not masking.mask_decoder_layers:
            return self
        layers = range(self.config.model.num_layers, self.config.model_with_mask_decoder().num_layers)
        unused = tuple(f"{BACKBONE}blocks.{layer}." for layer in layers)
        shapes = {name: shape for name, shape in self.shapes.items() if not name.startswith(unused)}
        config = self.config.model_copy(update={"masking": masking.model_copy(update={"mask_decoder_layers": 0})})
        return replace(self, config=config, shapes=shapes)

    def require_parameters(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Raises CheckpointError for a parameter of a model that the checkpoint lacks, or has in another shape."""
        for name, parameter in parameters:
            expected, stored = tuple(parameter.shape), self.shapes.get(name)
            if stored is None:
                raise CheckpointError(f"`{self.checkpoint.folder}` must hold the parameter {name}, but lacks it.")
            if stored != expected:
                raise CheckpointError(
                    f"`{self.checkpoint.folder}` must hold {name} as {list(expected)}, but holds {list(stored)} "
                    "instead."
                )

    def weight(self, name: str) -> Tensor:
        """Returns a full parameter in fp32; CheckpointError unless it is finite."""
        return self._weights().read(name).float()

    def blocks(self, name: str, num_rows: int | None = None) -> Iterator[Tensor]:
        """Yields a parameter, or its first `num_rows` rows, in consecutive blocks, of which memory holds one."""
        num_left = self.shapes[name][0] if num_rows is None else num_rows
        for block in self._weights().blocks(name):
            if num_left > 0:  # padding may follow
                yield block[:num_left].float()
            num_left -= len(block)

    def _weights(self) -> FiniteTensors:
        return FiniteTensors(MappedTensors(lambda name: (self.checkpoint, f"weight/{name}")), self.checkpoint.folder)

    def head_bias(self, head: HeadName) -> Tensor | None:
        """[V] fp32: the bias that a head of this name adds to `E h / T` (embedding, output, temperature), or None.
        CheckpointError for the training-free head if the checkpoint lacks target counts."""
        if head != "pmi":
            return self.learned_bias()
        if not self.has_target_counts():
            raise CheckpointError(
                f"`{self.checkpoint.folder}` must hold the counts of its training targets for --head pmi, "
                f"but lacks them; export with --head {self.config.objective.head_without_bias()} or none."
            )
        return self.training_free_bias()

    def has_target_counts(self) -> bool:
        """Whether the run counted its targets, as the training-free head needs."""
        return TARGET_COUNTS in self.checkpoint.tensors

    def target_counts(self) -> Tensor:
        """[padded V] int64: how often each id was a target."""
        return self.checkpoint.read(TARGET_COUNTS)

    def dataset_counts(self) -> Tensor | None:
        """[padded V] int64: how often each id occurs in the training text; None if unknown."""
        return self.checkpoint.read(_DATASET_COUNTS) if _DATASET_COUNTS in self.checkpoint.tensors else None

    def training_free_bias(self) -> Tensor:
        """[V] fp32: the bias that turns `E h / T` into log p. For the paper's objective it is log q: q is the
        distribution of the training targets, or of the text's tokens if training masked rare tokens more often."""
        objective, vocab_size, text_V = self.config.objective, self.config.model.vocab_size, self.dataset_counts()
        evaluated_V, targets = evaluation_target_counts(self.config, text_V), self._targets_per_group()
        bias_V = training_free_bias(objective, vocab_size, self.target_counts(), text_V, targets, evaluated_V)
        return torch.zeros(vocab_size) if bias_V is None else bias_V

    def learned_bias(self) -> Tensor | None:
        """[V] fp32: the bias of a trained head, or None."""
        name = next((name for name in (f"{MASK_HEAD}bias", OUTPUT_BIAS) if name in self.shapes), None)
        return None if name is None else self.weight(name)[: self.config.model.vocab_size]

    def temperature(self) -> float:
        """The divisor of the scores."""
        objective = self.config.objective
        return self.weight(TEMPERATURE).exp().item() if objective.learned_temperature else objective.temperature

    def _targets_per_group(self) -> float:
        """Mean number of targets of a candidate group over the run; the config's expected number if none were
        counted."""
        state, config = self.checkpoint.state, self.config
        per_sample = state.get("targets", 0) / max(target_samples(self.checkpoint), 1) or config.targets_per_row()
        return float(per_sample * state.get("group_samples", config.batch.micro_size))

    def load(self) -> Pretraining:
        """Returns the model in fp32 on the CPU, in evaluation mode; CheckpointError when a parameter is missing, or its
        shape differs from the config's."""
        pretraining = build_parallel_model(self.config, Group(), torch.device("cpu"))
        self.require_parameters(pretraining.named_parameters())
        load_weights_(pretraining, Group(), self._weights())
        return pretraining.eval()

    def tokenizer_path(self) -> Path | None:
        """The tokenizer's file: the copy in the run folder, else the file in the config."""
        configured = self.config.data.tokenizer
        paths = [self.run_folder().tokenizer, *([Path(configured)] if configured else [])]
        return next((path for path in paths if path.is_file()), None)

    def tokenizer_fingerprint(self) -> str | None:
        """The fingerprint of the run's tokenizer (`data.tokenizer.has_fingerprint`); None if it was not recorded."""
        fingerprint: str | None = self.checkpoint.state_value("texts", dict, default={}).get("data.tokenizer")
        return fingerprint

    def run_folder(self) -> RunFolder:
        """The folder of the run that the checkpoint is from."""
        return RunFolder.of(self.checkpoint.folder)
