"""The module that is trained: backbone and objective, batch in, loss out; built whole or split over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.distributed.group import Group
from megahead.distributed.tensors import TensorSource, copy_rows_
from megahead.losses.candidates import Candidates, vocabulary_candidates
from megahead.losses.scores import SCORES, LearnedTemperature, Score
from megahead.losses.softmax import CandidateShard, EvaluationSums, Softmax, streamed_sums
from megahead.models.backbone import Backbone
from megahead.models.documents import TargetPositions
from megahead.models.families import SHARDING, build_backbone, initial_blocks, initial_value
from megahead.models.parallel import parallelize_, shard_dims
from megahead.objectives.auxiliary import Auxiliary, Pass, build_auxiliary
from megahead.objectives.micro_batch import (
    EvaluationRequest,
    MaskHead,
    MicroBatch,
    OutputBias,
    OutputEmbedding,
    all_positions_of,
    documents_of,
    target_positions_of,
    token_subsets_of,
)

# In a headless run (contrastive weight tying) the candidates are the input embeddings of a candidate group's targets;
# such a group is consecutive samples. In a vanilla run they are the whole vocabulary.
#
# B rows, T inputs a row, M = B T, D features, N targets, U candidates, w: one rank's share of them, V vocabulary.


Part = tuple[Tensor, Tensor, Candidates]
"""Outputs of targets of one candidate group, and its candidates with their rows."""

ErrorsCallback = Callable[[Tensor, Tensor], None]
MetricsCallback = Callable[[Mapping[str, Tensor]], None]


class Pretraining(nn.Module):
    """`backbone` trained by `objective`: a MicroBatch gives its weighted loss, an EvaluationRequest its
    EvaluationSums.

    Both go through `forward`, because under ZeRO-3 weights exist only there. Rows of the embedding from `vocab_size` on
    are padding: never candidates. `mask_head` transforms an encoder's outputs before the softmax over the vocabulary.
    `on_errors`, if it is set, receives the targets of each training batch, int64 [N], and whether another candidate
    had a higher score, bool [N]. It adds a third of the cost of the loss.

    With an `auxiliary` objective its loss counts beside the softmax's; `on_metrics` receives its sums of each batch.
    If it has a generator, that learns the targets in the backbone's place.

    Weights may be split over a tensor `group`, every rank of which is called with the same inputs. A headless softmax
    splits its candidates evenly over the ranks; a softmax over the vocabulary leaves each row on the rank that owns it,
    which also balances the work. An encoder's transform, and biases, are full on every rank.
    """

    def __init__(
        self,
        backbone: Backbone,
        objective: ObjectiveConfig,
        vocab_size: int,
        head: OutputEmbedding | None = None,
        mask_head: MaskHead | None = None,
        output_bias: OutputBias | None = None,
        auxiliary: Auxiliary | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.objective = objective
        self.vocab_size = vocab_size
        self.head = head
        self.mask_head = mask_head
        self.output_bias = output_bias
        self.group = Group()
        self._auxiliary_key = "" if auxiliary is None else auxiliary.key
        if auxiliary is not None:
            self.add_module(auxiliary.key, auxiliary)
        self.on_errors: ErrorsCallback | None = None
        self.on_metrics: MetricsCallback | None = None
        self.temperature = LearnedTemperature(objective.temperature) if objective.learned_temperature else None

    @overload
    def __call__(self, request: MicroBatch) -> Tensor: ...
    @overload
    def __call__(self, request: EvaluationRequest) -> EvaluationSums: ...
    def __call__(self, request: MicroBatch | EvaluationRequest) -> Tensor | EvaluationSums:
        result: Tensor | EvaluationSums = super().__call__(request)
        return result

    def forward(self, request: MicroBatch | EvaluationRequest) -> Tensor | EvaluationSums:
        return self._loss(request) if isinstance(request, MicroBatch) else self._evaluation_sums(request)

    def encoders(self) -> list[Backbone]:
        """All that turn rows of the table into hidden states, the backbone first."""
        return [self.backbone, *([] if self.auxiliary is None or (g := self.auxiliary.generator) is None else [g])]

    @property
    def auxiliary(self) -> Auxiliary | None:
        """The objective beside the softmax."""
        found: Auxiliary | None = getattr(self, self._auxiliary_key) if self._auxiliary_key else None
        return found

    def _loss(self, micro: MicroBatch) -> Tensor:
        """Scalar, connected to every trained parameter, also when the micro-batch has no targets."""
        batch, auxiliary = micro.batch, self.auxiliary
        inputs_BTD, rows = self._look_up(batch.input_ids_BT, micro.candidates)
        outputs_ND, hidden_MD = self._outputs_and_hidden(inputs_BTD, batch)
        sizes = [candidates.target_N.numel() for candidates in micro.candidates]
        parts = list(zip(outputs_ND.split(sizes), rows, micro.candidates, strict=True))
        loss = self._loss_of_targets(outputs_ND, parts, batch)
        if auxiliary is None:
            return loss * micro.loss_weight
        predictions = partial(self._predictions, parts, outputs_ND, batch)
        sums = auxiliary.checked_sums(Pass(self.backbone, batch, inputs_BTD, outputs_ND, hidden_MD, predictions))
        if self.on_metrics is not None:
            self.on_metrics(sums)
        if micro.auxiliary_weight is None:
            return (loss + auxiliary.weight * sums["loss"]) * micro.loss_weight
        return loss * micro.loss_weight + auxiliary.weight * micro.auxiliary_weight * sums["loss"]

    def _predictions(
        self, parts: Sequence[Part], outputs_ND: Tensor, batch: Batch, bias_V: Tensor | None = None, *, all_ids: bool
    ) -> list[Softmax]:
        """What the outputs say of their targets (see `auxiliary.Predictions`), in the order of these. Rows learn."""
        if all_ids:  # cut out of the matrix with gradients, which a cut without them would not pass on
            parts = [(outputs_ND, self._output_rows(), vocabulary_candidates(batch.target_ids_N, bias_V))]
        with torch.no_grad():
            return [self._among(*part) for part in parts]

    def _loss_of_targets(self, outputs_ND: Tensor, parts: Sequence[Part], batch: Batch) -> Tensor:
        """The loss summed over all targets."""
        softmaxes = [self._among(*part) for part in parts]
        loss = torch.stack([each.loss() for each in softmaxes]).sum()
        if self.on_errors is not None:
            self.on_errors(batch.target_ids_N, torch.cat([each.top1_errors() for each in softmaxes]))
        share = self.objective.vanilla_weight
        if share:
            all_ids = vocabulary_candidates(batch.target_ids_N, weight_N=batch.weight_N)
            loss = (1 - share) * loss + share * self._among(outputs_ND, self._output_rows(), all_ids).loss()
        return loss

    def _among(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates) -> Softmax:
        """The outputs and their candidates; all ids have the learned bias, where there is one."""
        hidden_ND, bias_V = self._final_hidden(outputs_ND, candidates.ids_U is None)
        if bias_V is not None:
            candidates = replace(candidates, bias_U=bias_V, subtracts_target_bias=True)
        return Softmax(hidden_ND, rows_wD, candidates, self._score(), self._shard(candidates))

    def _shard(self, candidates: Candidates) -> CandidateShard | None:
        """This rank's share of the candidates: an even one, or of the whole vocabulary the rows that it owns; None
        where it has all."""
        if self.group.size == 1:
            return None
        if candidates.ids_U is None:
            return CandidateShard.of(self.vocab_size, len(self._output_rows()), self.group)
        count = candidates.ids_U.numel()
        return CandidateShard.of(count, self._even(count), self.group)

    def _even(self, candidates: int) -> int:
        """How many candidates each rank gets, padding included."""
        return max(1, -(-candidates // self.group.size))

    def _look_up(self, input_ids_BT: Tensor, per_group: tuple[Candidates, ...]) -> tuple[Tensor, list[Tensor]]:
        """Embeddings of the inputs [B, T, D], and of this rank's share of each candidate group [w, D], in one embedding
        call. If the candidates are the whole vocabulary, they are the rows of the output matrix."""
        ids = [candidates.ids_U for candidates in per_group if candidates.ids_U is not None]
        if not ids:
            return self.backbone.embed(input_ids_BT), [self._output_rows() for _ in per_group]
        if self.group.size == 1:
            looked_up = self.backbone.embed(torch.cat([input_ids_BT.flatten(), *ids]))
            inputs_MD, *rows = looked_up.split([input_ids_BT.numel(), *map(len, ids)])
            return inputs_MD.view(*input_ids_BT.shape, -1), rows
        by_rank = [self._split_evenly(ids_U) for ids_U in ids]
        scattered_ids = torch.cat(by_rank, dim=1).flatten()  # rank by rank, each rank's share of every candidate group
        inputs_BTD, shares_WD = self.backbone.embedding(input_ids_BT, scattered_ids)
        return inputs_BTD, list(shares_WD.split([ids_Rw.shape[1] for ids_Rw in by_rank]))

    def _split_evenly(self, ids_U: Tensor) -> Tensor:
        """[ranks, w]: the ids split evenly, padded with -1."""
        width = self._even(len(ids_U))
        return F.pad(ids_U, (0, width * self.group.size - len(ids_U)), value=-1).view(self.group.size, width)

    def _outputs(self, inputs_BTD: Tensor, batch: Batch) -> Tensor:
        """[N, D]: the hidden states that have targets."""
        return self._hidden_at(target_positions_of(batch), inputs_BTD, batch)

    def _outputs_and_hidden(self, inputs_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The same; and [M, D], the hidden states of all tokens, where the auxiliary objective needs them."""
        if self.auxiliary is None or not self.auxiliary.needs_all_outputs:
            return self._outputs(inputs_BTD, batch), None
        hidden_MD = self._hidden_at(all_positions_of(batch), inputs_BTD, batch)
        return hidden_MD.index_select(0, batch.target_index_N), hidden_MD

    def _hidden_at(self, wanted: TargetPositions, inputs_BTD: Tensor, batch: Batch) -> Tensor:
        """[N, D]: the hidden states there, of what learns the targets."""
        return self.encoders()[-1].encode_at(inputs_BTD, documents_of(batch), wanted, token_subsets_of(batch))

    def _final_hidden(self, outputs_ND: Tensor, vocabulary: bool) -> tuple[Tensor, Tensor | None]:
        """[N, D]: outputs to be scored against rows; [V]: a learned bias, or None.

        With `vocabulary` an encoder's outputs go through BERT's transform.
        """
        bias_V = None
        if vocabulary and self.mask_head is not None:
            outputs_ND, bias_V = self.mask_head(outputs_ND), self.mask_head.bias[: self.vocab_size]
        if vocabulary and self.output_bias is not None:
            bias_V = self.output_bias.bias[: self.vocab_size]
        return outputs_ND, bias_V

    def _score(self) -> Score:
        """How outputs are compared with rows, by a temperature that is fixed or learned."""
        return SCORES[self.objective.score](self.temperature or self.objective.temperature)

    def _evaluation_sums(self, request: EvaluationRequest) -> EvaluationSums:
        outputs = [self._outputs(self.backbone.embed(batch.input_ids_BT), batch) for batch in request.batches]
        outputs_ND, target_ids_N = torch.cat(outputs), torch.cat([batch.target_ids_N for batch in request.batches])
        hidden_ND, learned_V = self._final_hidden(outputs_ND, vocabulary=True)
        bias_V = request.bias_V if learned_V is None else learned_V
        weights = [batch.weight_N for batch in request.batches if batch.weight_N is not None]
        weight_N = torch.cat(weights) if weights else None
        vocabulary = vocabulary_candidates(target_ids_N, bias_V, weight_N)
        if (blocks := self.backbone.embedding_blocks(self.vocab_size)) is not None:
            sums = streamed_sums(hidden_ND, blocks, vocabulary, self._score())
        else:
            shard = self._shard(vocabulary)
            sums = Softmax(hidden_ND, self._output_rows(), vocabulary, self._score(), shard).sums()
        if self.auxiliary is None or not self.auxiliary.evaluated:
            return sums
        return sums._replace(auxiliary=self._auxiliary_sums(self.auxiliary, outputs, request))

    def _auxiliary_sums(
        self, auxiliary: Auxiliary, outputs: Sequence[Tensor], request: EvaluationRequest
    ) -> dict[str, float]:
        """Those of all batches; predictions are those of the head over all ids."""
        sums: dict[str, Tensor] = {}
        for batch, outputs_nD in zip(request.batches, outputs, strict=True):
            inputs_BTD = self.backbone.embed(batch.input_ids_BT)
            hidden_MD = self._outputs_and_hidden(inputs_BTD, batch)[1] if auxiliary.needs_all_outputs else None
            predictions = partial(self._predictions, (), outputs_nD, batch)
            given = Pass(self.backbone, batch, inputs_BTD, outputs_nD, hidden_MD, predictions, request.bias_V, False)
            for name, value in auxiliary.checked_sums(given).items():
                sums[name] = sums[name] + value if name in sums else value
        return {name: float(value) for name, value in sums.items()}

    def _output_rows(self) -> Tensor:
        """[V, D]: the matrix that outputs are multiplied by, without its padding: the input embedding itself unless
        there is a head. Of several ranks this one's rows, with the padding, which `_shard` leaves out."""
        matrix: Tensor = (self.backbone.embedding if self.head is None else self.head).weight
        return matrix[: self.vocab_size] if self.group.size == 1 else matrix


TEMPERATURE = "temperature.log_value"


def build_pretraining(config: RunConfig) -> Pretraining:
    """The full model on torch's default device, weights undefined; runs use `assemble`, which shards it."""
    model, objective = config.model_in_training(), config.objective
    head = OutputEmbedding(model.padded_vocab_size(), model.hidden_size) if objective.trains_head() else None
    mask_head = MaskHead(model) if model.is_encoder() and objective.has_mask_head() else None
    output_bias = OutputBias(model.padded_vocab_size()) if objective.output_bias else None
    layers = head, mask_head, output_bias, build_auxiliary(config)
    return Pretraining(build_backbone(model), objective, model.vocab_size, *layers)


def weight_shapes(config: RunConfig) -> dict[str, torch.Size]:
    """Shapes of all parameters of the full (unsharded) model, by name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build_pretraining(config).named_parameters()}


@dataclass(frozen=True)
class InitialWeights:
    """What the parameters of a new run start from, by name: full fp32 CPU tensors.

    Each is drawn when it is asked for, and depends only on `config.seed` and its name.
    """

    config: RunConfig
    shapes: Mapping[str, torch.Size]

    def read(self, name: str, /) -> Tensor:
        """All of one."""
        if name == TEMPERATURE:
            return LearnedTemperature(self.config.objective.temperature).initial_value()
        return initial_value(name, self.shapes[name], self.config.seed, self._model_of(name))

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        """The same bits in blocks of rows."""
        if name == TEMPERATURE:
            return iter([self.read(name)])
        return initial_blocks(name, self.shapes[name], self.config.seed, self._model_of(name))

    def _model_of(self, name: str) -> ModelConfig:
        """The one whose parameter it is, and on whose depth its first value may depend."""
        generator = self.config.generator_config() if ".generator." in name else None
        return generator or self.config.model_in_training()


def initial_weights(config: RunConfig) -> InitialWeights:
    """Those of a run of `config`; draws nothing."""
    return InitialWeights(config, weight_shapes(config))


class SplitOutputEmbedding(OutputEmbedding):
    """This rank's rows of an untied head, split like those of the embedding table."""

    shard_dims: ClassVar[Mapping[str, int]] = {"weight": 0}


def assemble(config: RunConfig, group: Group, device: torch.device) -> Pretraining:
    """The model of `config`, split over `group`, with unallocated parameters: a shape on `device`, no memory.

    `fill_` gives them memory and values; so does an engine, which may partition them further. No rank ever holds the
    full model. With one rank the layers are the plain ones. Sends nothing.
    """
    with torch.device("meta"):
        module = build_pretraining(config)
        if group.size > 1:
            _split_(module, config, group)
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            one_number = torch.zeros((), dtype=parameter.dtype, device=device)
            setattr(layer, name, nn.Parameter(one_number.expand(parameter.shape)))
    for name in shard_dims(module):
        module.get_parameter(name).model_parallel = True  # type: ignore[attr-defined]  # lost on the way from meta
    return module


def fill_(module: nn.Module, group: Group, weights: TensorSource) -> None:
    """Sets every parameter to this rank's slice of the full tensor of its name.

    Beside the parameters memory holds a block of one of them, or all of one whose columns are split.
    """
    dims = shard_dims(module)
    for name, parameter in module.named_parameters():
        part = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if dims.get(name):  # not the rows
            part.copy_(group.shard(weights.read(name), dims[name]).detach())
        else:
            copy_rows_(part, weights.blocks(name), group.rank * len(part) if name in dims else 0)
        parameter.data = part


def _split_(module: Pretraining, config: RunConfig, group: Group) -> None:
    sharding, sequence = SHARDING[config.model.family], config.parallel.sequence
    parallelize_(module.backbone, sharding, group, sequence=sequence)
    for generator in module.encoders()[1:]:
        of_blocks = {pattern: kind for pattern, kind in sharding.items() if pattern != "embedding"}
        parallelize_(generator, of_blocks, group, sequence=sequence)
    if module.head is not None:
        rows, features = config.model.padded_vocab_size() // group.size, config.model.hidden_size
        module.head = SplitOutputEmbedding(rows, features)
    module.group = group
