"""What a model may learn beside the softmax over candidates: the interface of such an objective, and how it is built.

B rows, T inputs a row, M = B T, D features, N targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from megahead.config.auxiliary import AuxiliarySettings, CustomConfig
from megahead.config.base import load_class
from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch, RowCollator
from megahead.data.indexed import DatasetInfo, IndexedDataset
from megahead.data.loader import held_out_collator, training_collator
from megahead.data.samples import CounterRng
from megahead.data.strategy import ErrorCounts
from megahead.errors import ConfigError
from megahead.losses.softmax import Softmax
from megahead.models.backbone import Backbone


class Predictions(Protocol):
    """What the outputs say of their targets, without gradients."""

    def __call__(self, bias_V: Tensor | None = None, *, all_ids: bool) -> list[Softmax]:
        """Among all ids, by a head with the bias `bias_V`, or for each candidate group among its candidates."""
        ...


@dataclass(frozen=True)
class Pass:
    """One pass of the model over a batch, as an auxiliary objective sees it."""

    backbone: Backbone
    batch: Batch

    inputs_BTD: Tensor
    """The embedded inputs."""

    outputs_ND: Tensor
    """Final hidden states of the targets, of what learns these."""

    hidden_MD: Tensor | None
    """Those of all tokens, rows concatenated, where the objective `needs_all_outputs`."""

    predictions: Predictions

    head_bias_V: Tensor | None = None
    """In an evaluation the bias of the head over all ids."""

    training: bool = True


class Auxiliary(nn.Module):
    """An auxiliary objective: `prepare` in the loader's thread, then `sums` in the pass of each micro-batch.

    The class is made for a run's config before the weights are known: layers are built on the current device, and get
    their first values by name (norms 1, biases 0, matrices as the model's). Every tensor rank has all of it, and sees
    the same inputs. Under ZeRO 3 a weight is whole only inside of the layer that owns it: call layers.
    """

    key = "custom"
    """Under this name its parameters are in checkpoints."""

    needs_all_outputs = False
    """Whether `Pass.hidden_MD` is needed; by default targets' outputs alone are computed. The settings of what is
    built in say it, for estimates too."""

    evaluated = False
    """Whether held-out text is scored by it, too."""

    generator: Backbone | None
    """A second encoder, which learns the targets in the model's place."""

    sampling_bias_V: Tensor | None
    """The bias of the training-free head, in runs whose settings say that tokens are drawn from all ids."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        settings = config.objective.auxiliary()
        assert settings is not None
        self.weight, self.needs_all_outputs = settings.weight, settings.needs_all_outputs
        self.generator, self.sampling_bias_V = None, None

    @classmethod
    def head_parameters(cls, model: ModelConfig) -> int:
        """How many parameters it has, for estimates."""
        return 0

    @classmethod
    def prepare(cls, batch: Batch, config: RunConfig, rng: CounterRng) -> Any:
        """Tensors of a batch on the CPU that `sums` will find in `Pass.batch.auxiliary`, in any nesting of tuples,
        lists and dicts. `rng` draws by the samples' numbers alone: what is drawn is the same on any mesh."""
        return ()

    @classmethod
    def collator(cls, collator: RowCollator, config: RunConfig, seed: int) -> RowCollator:
        """`collator`, whose batches also have what is prepared. By default its targets stay as they are."""
        return _Preparing(collator, cls, config, seed)

    @classmethod
    def counted(cls, batch: Batch) -> int | None:
        """How many of what its loss is a mean over the batch has; None: the targets, by their weights."""
        return None

    def sums(self, given: Pass) -> Mapping[str, Tensor]:
        """Scalars by name, summed over the batch, `loss` among them, which has a gradient; all others are logged, as
        `AuxiliarySettings.means` makes means of the sums over all ranks (by default for one of `count`)."""
        raise NotImplementedError

    def checked_sums(self, given: Pass) -> Mapping[str, Tensor]:
        """`sums`; ConfigError unless they are scalar tensors by name, `loss` among them."""
        sums = self.sums(given)
        named = sums if isinstance(sums, Mapping) else {type(sums).__name__: sums}
        if "loss" in named and all(isinstance(value, Tensor) and value.dim() == 0 for value in named.values()):
            return named
        rule = "name a class whose `sums` returns scalar tensors by name, `loss` among them"
        kinds = {name: list(v.shape) if isinstance(v, Tensor) else type(v).__name__ for name, v in named.items()}
        raise ConfigError("objective.custom.objective", rule, got=f"one with {kinds}")


@dataclass(frozen=True)
class _Preparing(RowCollator):
    """Makes the batches of `inner`, with what the objective prepares."""

    inner: RowCollator
    kind: type[Auxiliary]
    config: RunConfig
    seed: int

    @property
    def upper_bound(self) -> bool:  # type: ignore[override]
        return self.inner.upper_bound

    def batch(self, text: Any, sample_indices: Any, document_starts: Any = None) -> Batch:
        batch = self.inner.batch(text, sample_indices, document_starts)
        return replace(batch, auxiliary=self.kind.prepare(batch, self.config, CounterRng(self.seed, sample_indices)))

    def num_predicted_tokens(self, info: DatasetInfo) -> int | None:
        return self.inner.num_predicted_tokens(info)


def auxiliary_kind(settings: AuxiliarySettings) -> type[Auxiliary]:
    """The class that computes it. ConfigError where one's own cannot be imported or is none."""
    kind = load_class("objective.custom.objective", settings.implementation())
    if not (isinstance(kind, type) and issubclass(kind, Auxiliary)):
        rule = "name a subclass of megahead.objectives.auxiliary.Auxiliary"
        raise ConfigError("objective.custom.objective", rule, got=repr(settings.implementation()))
    return kind


def build_auxiliary(config: RunConfig) -> Auxiliary | None:
    """That of a run, on torch's default device. ConfigError where it has what no checkpoint could hold."""
    settings = config.objective.auxiliary()
    if settings is None:
        return None
    built = auxiliary_kind(settings)(config)
    without_dimension = [name for name, parameter in built.named_parameters() if not parameter.ndim]
    if lacking := [*without_dimension, *(name for name, _ in built.named_buffers())]:
        rule = "have parameters of one dimension or more, and no buffers"
        got = f"{settings.implementation()!r} with `{lacking[0]}`"
        raise ConfigError("objective.custom.objective", rule, got=got)
    if isinstance(settings, CustomConfig) and built.key != Auxiliary.key:
        rule = f"leave `key` as it is ({Auxiliary.key}), since other names are those of the model's own parts"
        raise ConfigError("objective.custom.objective", rule, got=f"{settings.implementation()!r} with {built.key!r}")
    return built


def with_auxiliary(collator: RowCollator, config: RunConfig, seed: int, *, held_out: bool = False) -> RowCollator:
    """`collator`, whose batches also have what the run's auxiliary objective needs. For `held_out` rows only if it is
    evaluated on them."""
    settings = config.objective.auxiliary()
    kind = None if settings is None else auxiliary_kind(settings)
    return collator if kind is None or (held_out and not kind.evaluated) else kind.collator(collator, config, seed)


def training_rows(
    config: RunConfig,
    datasets: Sequence[IndexedDataset],
    error_counts: ErrorCounts | None = None,
    steps_before_masking: int = 0,
) -> RowCollator:
    """How a run, or a phase of it, makes batches of its training samples; arguments as of `training_collator`."""
    return with_auxiliary(training_collator(config, datasets, error_counts, steps_before_masking), config, config.seed)


def held_out_rows(config: RunConfig) -> RowCollator:
    """The same of held-out rows, which are masked alike in every run."""
    return with_auxiliary(held_out_collator(config), config, 0, held_out=True)
