"""Auxiliary objectives, trained in addition to the softmax over candidates: their interface and construction.

B rows, T inputs per row, M = B T, D features, N targets, P targets of an objective's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from megahead.config.auxiliaries import CustomConfig
from megahead.config.auxiliary import AuxiliarySettings
from megahead.config.base import load_class
from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch, RowCollator
from megahead.data.indexed import DatasetInfo, IndexedDataset
from megahead.data.loader import held_out_collator, training_collator
from megahead.data.samples import CounterRng
from megahead.data.strategy import TargetErrorCounts
from megahead.errors import ConfigError
from megahead.losses.softmax import Softmax
from megahead.models.backbone import Backbone


class Predictions(Protocol):
    """Predicts the targets from the outputs, without gradients."""

    def __call__(self, bias_V: Tensor | None = None, *, all_ids: bool) -> list[Softmax]:
        """The softmax over all ids, with the head's bias `bias_V`, or for each candidate group over its candidates."""
        ...


class Targets(NamedTuple):
    """An auxiliary objective's own targets: what P outputs must predict beside the batch's targets."""

    index_P: Tensor
    """int64, increasing: the positions of these outputs among all B * T."""

    ids_P: Tensor
    """int64: their targets."""


TargetsLoss = Callable[[Tensor], Tensor]
"""The run's softmax loss of outputs [P, D] for an objective's own targets, among its candidate groups' candidates; a
differentiable sum."""

CandidatesLoss = Callable[[Tensor, Tensor], Tensor]
"""The loss of other outputs [N, D] for the batch's targets with the float32 weights [N], summed, differentiable; among
the same candidates, which are not looked up again."""


@dataclass(frozen=True)
class ForwardContext:
    """One forward pass of the model over a batch: the argument of an auxiliary objective."""

    backbone: Backbone
    batch: Batch

    inputs_BTD: Tensor
    """The embedded inputs."""

    outputs_ND: Tensor
    """Final hidden states of the targets, from the generator if there is one, else from the backbone."""

    hidden_MD: Tensor | None
    """Final hidden states of all tokens, rows concatenated, if the objective `needs_all_outputs`."""

    predictions: Predictions

    head_bias_V: Tensor | None = None
    """In evaluation the bias of the head over all ids."""

    training: bool = True

    first_BD: Tensor | None = None
    """Final hidden states of the rows' first tokens, [CLS], if the objective `needs_first_outputs`."""

    targets_loss: TargetsLoss | None = None
    """In training the loss of the objective's own `targets`, if it has some."""

    candidates_loss: CandidatesLoss | None = None
    """In training the loss of other outputs for the batch's targets."""

    bag_loss: TargetsLoss | None = None
    """In training the bag-of-words loss: each row's outputs at its own `targets` together predict the set of these
    targets."""


class Auxiliary(nn.Module):
    """An auxiliary objective: `prepare` runs in the loader's thread, `sums` in each micro-batch's forward pass.

    It is constructed from a run's config, with layers on the current device; initial values follow from parameter names
    (norms 1, biases 0, matrices as in the model). It is replicated on all tensor ranks, which have the same inputs.
    Under ZeRO 3 a weight is complete only inside its own layer: call layers, do not read weights.
    """

    module_name = "custom"
    """Name of its submodule: the prefix of its parameters in checkpoints."""

    needs_all_outputs = False
    """Whether it needs `ForwardContext.hidden_MD`; by default only targets' outputs are computed. Built-in objectives
    define it in their settings, for `megahead estimate`."""

    needs_first_outputs = False
    """Whether it needs `ForwardContext.first_BD`."""

    is_evaluated = False
    """Whether it is also evaluated on held-out text."""

    generator: Backbone | None
    """A second encoder, which learns the targets instead of the backbone."""

    training_free_bias_V: Tensor | None
    """The bias of the training-free head, in runs whose settings sample tokens from all ids."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        settings = config.objective.auxiliary()
        assert settings is not None
        self.weight, self.needs_all_outputs = settings.weight, settings.needs_all_outputs
        self.generator, self.training_free_bias_V = None, None

    @classmethod
    def head_parameters(cls, model: ModelConfig) -> int:
        """Its number of parameters, for `megahead estimate`."""
        return 0

    @classmethod
    def prepare(cls, batch: Batch, config: RunConfig, rng: CounterRng) -> Any:
        """CPU tensors of a batch, which `sums` reads from `ForwardContext.batch.auxiliary`, in any nesting of tuples,
        lists and dicts. The random numbers of `rng` depend only on the samples' indices: they are equal on any mesh."""
        return ()

    @classmethod
    def extend(cls, batch: Batch, config: RunConfig, rng: CounterRng) -> Batch:
        """The batch with the result of `prepare`; an override may also change what the encoder reads."""
        return replace(batch, auxiliary=cls.prepare(batch, config, rng))

    @classmethod
    def collator(cls, collator: RowCollator, config: RunConfig, seed: int) -> RowCollator:
        """A collator that applies `extend` to the batches of `collator`."""
        return _AuxiliaryCollator(collator, cls, config, seed)

    @classmethod
    def targets(cls, batch: Batch) -> Targets | None:
        """Targets of its own, which `ForwardContext.targets_loss` predicts; None: it has none."""
        return None

    @classmethod
    def num_loss_terms(cls, batch: Batch) -> int | None:
        """The denominator of the loss: how many own targets the batch has; None: the batch's targets."""
        targets = cls.targets(batch)
        return None if targets is None else len(targets.ids_P)

    def sums(self, context: ForwardContext) -> Mapping[str, Tensor]:
        """Scalar tensors by name, summed over the batch: `loss`, which is differentiated, and metrics, which are logged
        as the means that `AuxiliarySettings.means` computes from the sums over all ranks (by default per `count`)."""
        raise NotImplementedError

    def compute_sums(self, context: ForwardContext) -> Mapping[str, Tensor]:
        """The result of `sums`; ConfigError unless it is scalar tensors by name with a `loss`."""
        sums = self.sums(context)
        sums = sums if isinstance(sums, Mapping) else {type(sums).__name__: sums}
        if "loss" in sums and all(isinstance(value, Tensor) and value.dim() == 0 for value in sums.values()):
            return sums
        rule = "name a class whose `sums` returns scalar tensors by name, `loss` among them"
        shapes = {name: list(v.shape) if isinstance(v, Tensor) else type(v).__name__ for name, v in sums.items()}
        raise ConfigError("objective.custom.objective", rule, got=f"one with {shapes}")


@dataclass(frozen=True)
class _AuxiliaryCollator(RowCollator):
    """Extends the batches of `inner` by what the objective needs."""

    inner: RowCollator
    auxiliary_class: type[Auxiliary]
    config: RunConfig
    seed: int

    @property
    def loss_is_upper_bound(self) -> bool:  # type: ignore[override]
        return self.inner.loss_is_upper_bound

    def batch(self, text: Any, sample_indices: Any, document_starts: Any = None) -> Batch:
        batch = self.inner.batch(text, sample_indices, document_starts)
        return self.auxiliary_class.extend(batch, self.config, CounterRng(self.seed, sample_indices))

    def num_predicted_tokens(self, info: DatasetInfo) -> int | None:
        return self.inner.num_predicted_tokens(info)


def auxiliary_class(settings: AuxiliarySettings) -> type[Auxiliary]:
    """The class of the objective; ConfigError if a custom one cannot be imported or is no `Auxiliary`."""
    loaded = load_class("objective.custom.objective", settings.implementation)
    if not (isinstance(loaded, type) and issubclass(loaded, Auxiliary)):
        rule = "name a subclass of megahead.objectives.auxiliary.Auxiliary"
        raise ConfigError("objective.custom.objective", rule, got=repr(settings.implementation))
    _refuse_earlier_names(loaded, settings, counted="num_loss_terms", evaluated="is_evaluated")
    return loaded


def _refuse_earlier_names(custom: object, settings: AuxiliarySettings, **current_names: str) -> None:
    """ConfigError if `custom` has an attribute under an earlier name, which would be ignored."""
    for earlier, current in current_names.items():
        if hasattr(custom, earlier):
            got = f"{settings.implementation!r} with its earlier name `{earlier}`"
            raise ConfigError("objective.custom.objective", f"define `{current}`", got=got)


def build_auxiliary(config: RunConfig) -> Auxiliary | None:
    """The auxiliary objective of a run, on torch's default device; ConfigError if checkpoints do not support it."""
    settings = config.objective.auxiliary()
    if settings is None:
        return None
    auxiliary = auxiliary_class(settings)(config)
    scalars = [name for name, parameter in auxiliary.named_parameters() if not parameter.ndim]
    if unsupported := [*scalars, *(name for name, _ in auxiliary.named_buffers())]:
        rule = "have parameters of one dimension or more, and no buffers"
        got = f"{settings.implementation!r} with `{unsupported[0]}`"
        raise ConfigError("objective.custom.objective", rule, got=got)
    if isinstance(settings, CustomConfig) and auxiliary.module_name != Auxiliary.module_name:
        name = Auxiliary.module_name
        rule = f"leave `module_name` as it is ({name}), since other names are those of the model's own parts"
        got = f"{settings.implementation!r} with {auxiliary.module_name!r}"
        raise ConfigError("objective.custom.objective", rule, got=got)
    return auxiliary


def add_auxiliary(collator: RowCollator, config: RunConfig, seed: int, *, held_out: bool = False) -> RowCollator:
    """A collator that adds what the run's auxiliary objective prepares; for `held_out` rows only if it is evaluated."""
    settings = config.objective.auxiliary()
    if settings is None or (held_out and not auxiliary_class(settings).is_evaluated):
        return collator
    extended = auxiliary_class(settings).collator(collator, config, seed)
    _refuse_earlier_names(extended, settings, predicted="num_predicted_tokens")
    return extended


def training_row_collator(
    config: RunConfig,
    datasets: Sequence[IndexedDataset],
    target_error_counts: TargetErrorCounts | None = None,
    steps_before_masking: int = 0,
) -> RowCollator:
    """The collator of a run or phase for training samples. `target_error_counts`: errors and targets of each id so far,
    for masking strategies that adapt; `steps_before_masking`: causal steps of the run before its first masked one."""
    collator = training_collator(config, datasets, target_error_counts, steps_before_masking)
    return add_auxiliary(collator, config, config.seed)


def held_out_row_collator(config: RunConfig) -> RowCollator:
    """The collator for held-out rows, which are masked equally in every run."""
    return add_auxiliary(held_out_collator(config), config, 0, held_out=True)
