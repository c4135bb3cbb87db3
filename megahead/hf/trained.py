"""A trained model on disk: its parameters, read one at a time, and where it comes from."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megahead.checkpoints.reading import Checkpoint, open_checkpoint, target_samples
from megahead.config.auxiliary import AuxiliarySettings
from megahead.config.data import DataConfig
from megahead.config.loading import config_from_checkpoint
from megahead.config.objective import HeadName
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import FiniteTensors, RoutedTensors
from megahead.errors import CheckpointError
from megahead.losses.candidates import evaluation_target_counts, training_free_bias
from megahead.objectives.pretraining import TEMPERATURE, Pretraining, assemble, fill_
from megahead.run_folder import RunFolder
from megahead.version import __version__

BACKBONE = "backbone."
EMBEDDING = "backbone.embedding.weight"
HEAD = "head.weight"
MASK_HEAD = "mask_head."
OUTPUT_BIAS = "output_bias.bias"
TARGET_COUNTS = "state/target_counts"
_PRIOR = "state/dataset_counts"


@dataclass(frozen=True)
class TrainedModel:
    """An open checkpoint and the run's config; nothing is loaded before it is used."""

    checkpoint: Checkpoint
    config: RunConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all parameters that the checkpoint holds, by their names in the `Pretraining`."""

    @staticmethod
    def open(path: Path) -> TrainedModel:
        """The model of a step folder, or the newest of a run."""
        return TrainedModel.of(open_checkpoint(path))

    @staticmethod
    def of(checkpoint: Checkpoint) -> TrainedModel:
        """The model in a checkpoint; as `open`."""
        config = config_from_checkpoint(checkpoint.config, source=f"the configuration in {checkpoint.folder}")
        stored = [name.removeprefix("weight/") for name in checkpoint.names() if name.startswith("weight/")]
        return TrainedModel(checkpoint, config, {name: checkpoint.shape(f"weight/{name}") for name in stored})

    def used(self) -> TrainedModel:
        """The part that is used after training: all but a decoder that alone sees mask tokens."""
        masking = self.config.masking
        if masking is None or not masking.mask_decoder_layers:
            return self
        layers = range(self.config.model.num_layers, self.config.model_in_training().num_layers)
        unused = tuple(f"{BACKBONE}blocks.{layer}." for layer in layers)
        shapes = {name: shape for name, shape in self.shapes.items() if not name.startswith(unused)}
        config = self.config.model_copy(update={"masking": masking.model_copy(update={"mask_decoder_layers": 0})})
        return replace(self, config=config, shapes=shapes)

    def require(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """CheckpointError for the first of a model's parameters that the checkpoint lacks, or has in another shape."""
        for name, parameter in parameters:
            wanted, found = tuple(parameter.shape), self.shapes.get(name)
            if found is None:
                raise CheckpointError(f"`{self.checkpoint.folder}` must hold the parameter {name}, but lacks it.")
            if found != wanted:
                raise CheckpointError(
                    f"`{self.checkpoint.folder}` must hold {name} as {list(wanted)}, but holds {list(found)} instead."
                )

    def weight(self, name: str) -> Tensor:
        """One full parameter in fp32; CheckpointError unless it is finite."""
        return self._weights().read(name).float()

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The same in consecutive blocks of rows; memory holds one of them."""
        return (block.float() for block in self._weights().blocks(name))

    def _weights(self) -> FiniteTensors:
        return FiniteTensors(RoutedTensors(lambda name: (self.checkpoint, f"weight/{name}")), self.checkpoint.folder)

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
        return TARGET_COUNTS in self.checkpoint.tensors

    def target_counts(self) -> Tensor:
        """[padded V] int64, where they were counted."""
        return self.checkpoint.read(TARGET_COUNTS)

    def dataset_counts(self) -> Tensor | None:
        """[padded V] int64: how often each id occurs in the training text; None if that is not known."""
        return self.checkpoint.read(_PRIOR) if _PRIOR in self.checkpoint.tensors else None

    def training_free_bias(self) -> Tensor:
        """[V] fp32: the bias that turns `E h / T` into log p. For the paper's objective log q: q the distribution of
        the targets trained on, or of the text's tokens if rare ones were masked more often."""
        size, token_counts_V, counts_V = self.config.model.vocab_size, self.dataset_counts(), self.target_counts()
        own_V = evaluation_target_counts(self.config, token_counts_V)
        bias_V = training_free_bias(self.config.objective, size, counts_V, token_counts_V, self._group_targets(), own_V)
        return torch.zeros(size) if bias_V is None else bias_V

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
        per_sample = state.get("targets", 0) / max(target_samples(self.checkpoint), 1) or config.targets_per_row()
        return float(per_sample * state.get("group_samples", config.batch.micro_size))

    def load(self) -> Pretraining:
        """The model itself, in fp32 on the CPU, ready to score; CheckpointError when a parameter is missing, or its
        shape is not that of the config."""
        pretraining = assemble(self.config, Group(), torch.device("cpu"))
        self.require(pretraining.named_parameters())
        fill_(pretraining, Group(), self._weights())
        return pretraining.eval()

    def tokenizer(self) -> Path | None:
        """The tokenizer's file of the run: its copy in the run folder, or the file the config names."""
        named = self.config.data.tokenizer
        places = [self.run_folder().tokenizer, *([Path(named)] if named else [])]
        return next((path for path in places if path.is_file()), None)

    def tokenizer_fingerprint(self) -> str | None:
        """By which the run's tokenizer is known again (`data.tokenizer.has_fingerprint`); None where it was not
        noted."""
        fingerprint: str | None = self.checkpoint.state_value("texts", dict, absent={}).get("data.tokenizer")
        return fingerprint

    def run_folder(self) -> RunFolder:
        """The folder of the run that was trained."""
        return RunFolder.of(self.checkpoint.folder)


# The origin of a model, for its card: data, code, and its last evaluation.

_CHECKOUT = Path(__file__).parents[2]


def dataset_names(data: DataConfig) -> str:
    """The training datasets by the last part of their paths, with the weights of a blend."""
    parts = [(Path(part.prefix).name, part.weight) for part in data.parts()]
    return ", ".join(name if weight is None else f"{name} (weight {weight:g})" for name, weight in parts)


def code_version() -> str:
    """The version that exports, with its commit if `.git` is directly above the package: an installed copy may lie in
    another project's repository."""
    command = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        if (_CHECKOUT / ".git").exists():
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
            return f"megahead {__version__}, commit {done.stdout.strip()}"
    return f"megahead {__version__}"


def last_evaluation(model: TrainedModel) -> str | None:
    """The last evaluation before the checkpoint, from the run's metrics.jsonl (which may also hold evaluations of
    orphaned steps: those that the run left when it resumed from an older checkpoint); None if there is none."""
    try:
        lines = model.run_folder().metrics.read_text(encoding="utf-8").split("\n")
    except OSError:
        return None
    summary = None
    for line in lines:
        try:
            record = json.loads(line)
            if _is_checkpoints_own(record["step"], record["validation"].get("loss"), model.checkpoint):
                summary = _summary(record["step"], record["validation"], model.config.objective.auxiliary())
        except (ValueError, KeyError, TypeError):  # another kind of record, or a line cut short
            continue
    return summary


def _is_checkpoints_own(step: int, loss: float, checkpoint: Checkpoint) -> bool:
    """Whether the evaluation at `step` is one that `checkpoint` remembers, not one of an orphaned step."""
    if "validation" not in checkpoint.state:  # checkpoints of the first version lack it
        return step <= checkpoint.step
    last = checkpoint.state["validation"]
    return last is not None and (step, loss) == (last["step"], last["loss"])


def _summary(step: int, found: dict[str, Any], auxiliary: AuxiliarySettings | None) -> str:
    """An evaluation in words. `found["head"]` predicted: `trained`, `tied`, or `pmi` (the training-free head)."""
    if auxiliary is not None and (means := found.get(auxiliary.metric_prefix)):
        whose = auxiliary.predictor_label
        return f"{auxiliary.export_text(means)} (step {step:,}), its {whose}perplexity {found['perplexity']:,.4g}"
    bits, most = found.get("bits_per_byte"), "at most " if found.get("upper_bound") else ""
    parts = [f"perplexity {most}{found['perplexity']:,.4g}"]
    parts += [] if bits is None else [f"{most}{bits:.4g} bits a byte"]
    return f"{', '.join(parts)}, accuracy {found['accuracy']:.1%} ({found['head']} head, step {step:,})"
