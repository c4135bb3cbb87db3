"""The trained module: backbone and objective, from batch to loss; full or split over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.distributed.group import Group
from megahead.distributed.tensors import TensorSource, copy_rows_
from megahead.losses.bag_of_words import Texts, bag_loss
from megahead.losses.candidates import Candidates, all_rows_as_candidates
from megahead.losses.scores import SCORES, LearnedTemperature, Score
from megahead.losses.softmax import CandidateShard, EvaluationSums, Softmax, streamed_sums
from megahead.models.backbone import Backbone
from megahead.models.documents import TargetPositions
from megahead.models.families import SHARDING, build_backbone, initial_blocks, initial_value
from megahead.models.layers import Embedding
from megahead.models.parallel import parallelize_, shard_dims
from megahead.objectives.auxiliary import Auxiliary, ForwardContext, Targets, build_auxiliary
from megahead.objectives.micro_batch import (
    EvaluationRequest,
    MaskHead,
    MicroBatch,
    OutputBias,
    all_positions_of,
    documents_of,
    target_and_first_positions_of,
    target_positions_of,
    token_subsets_of,
)

# In a headless run (contrastive weight tying) the candidates are the targets of a candidate group (consecutive
# samples): their input embeddings, or their rows of a second table, the head. In a vanilla run they are the whole
# vocabulary.
#
# B rows, T inputs per row, M = B T, D features, N targets, U candidates, w: one rank's share of them, W: its shares of
# all groups, R ranks, V vocabulary, P targets of an auxiliary objective's own.


GroupInputs = tuple[Tensor, Tensor, Candidates]
"""The outputs of one candidate group's targets, its candidates' rows, and its candidates."""

ErrorsCallback = Callable[[Tensor, Tensor], None]
MetricsCallback = Callable[[Mapping[str, Tensor]], None]


class Pretraining(nn.Module):
    """`backbone` trained with `objective`: maps a MicroBatch to its weighted loss, an EvaluationRequest to its
    EvaluationSums.

    Both use `forward`, because under ZeRO-3 weights are complete only inside it. Rows of the embedding from
    `vocab_size` on are padding, not candidates. `mask_head` transforms an encoder's outputs before the softmax over the
    vocabulary. `on_errors`, if set, receives the targets of each training batch, int64 [N], and whether another
    candidate scored at least as high, bool [N]. This adds a third to the loss's cost.

    The loss of an `auxiliary` objective is added to the softmax's; `on_metrics` receives its sums (`loss`, metrics) of
    each batch. If it has a generator, the generator learns the targets instead of the backbone.

    Weights may be split over a tensor `group`, all of whose ranks get the same inputs. A headless softmax splits its
    candidates evenly over the ranks; a softmax over the vocabulary uses each rank's own rows, which also balances the
    work. An encoder's transform, and biases, are replicated.
    """

    def __init__(
        self,
        backbone: Backbone,
        objective: ObjectiveConfig,
        vocab_size: int,
        head: nn.Embedding | None = None,
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
        self._auxiliary_name = "" if auxiliary is None else auxiliary.module_name
        if auxiliary is not None:
            self.add_module(auxiliary.module_name, auxiliary)
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

    def backbones(self) -> list[Backbone]:
        """The backbone, and the generator if there is one."""
        generator = None if self.auxiliary is None else self.auxiliary.generator
        return [self.backbone] if generator is None else [self.backbone, generator]

    @property
    def auxiliary(self) -> Auxiliary | None:
        """The auxiliary objective, if there is one."""
        auxiliary: Auxiliary | None = getattr(self, self._auxiliary_name) if self._auxiliary_name else None
        return auxiliary

    def _loss(self, micro: MicroBatch) -> Tensor:
        """The weighted loss, a scalar; every trained parameter gets a gradient from it, also without targets."""
        batch, auxiliary = micro.batch, self.auxiliary
        groups = (*micro.candidates, *micro.auxiliary_candidates)
        inputs_BTD, rows = self._embed_inputs_and_candidates(batch.input_ids_BT, groups)
        outputs_ND, hidden_MD, first_BD = self._outputs_and_hidden(inputs_BTD, batch)
        shared_rows, auxiliary_rows = rows[: len(micro.candidates)], rows[len(micro.candidates) :]
        parts = _split_groups(outputs_ND, shared_rows, micro.candidates)
        loss = self._loss_of_targets(outputs_ND, parts, batch)
        if auxiliary is None:
            return loss * micro.loss_weight
        predictions, targets = partial(self._predictions, parts, outputs_ND, batch), auxiliary.targets(batch)
        context = ForwardContext(
            self.backbone,
            batch,
            inputs_BTD,
            outputs_ND,
            hidden_MD,
            predictions,
            first_BD=first_BD,
            targets_loss=targets and partial(self._loss_of_auxiliary_targets, targets, micro, auxiliary_rows),
            candidates_loss=partial(self._loss_among_candidates, micro, shared_rows),
            bag_loss=targets and partial(self._loss_of_auxiliary_bags, targets, micro, auxiliary_rows),
        )
        sums = auxiliary.compute_sums(context)
        if self.on_metrics is not None:
            self.on_metrics(sums)
        if micro.auxiliary_weight is None:
            return (loss + auxiliary.weight * sums["loss"]) * micro.loss_weight
        return loss * micro.loss_weight + auxiliary.weight * micro.auxiliary_weight * sums["loss"]

    def _predictions(
        self,
        parts: Sequence[GroupInputs],
        outputs_ND: Tensor,
        batch: Batch,
        bias_V: Tensor | None = None,
        *,
        all_ids: bool,
    ) -> list[Softmax]:
        """The softmaxes over the targets' candidates (see `auxiliary.Predictions`), in the order of the targets."""
        if all_ids:  # outside no_grad, so that the rows' slice of the matrix is differentiable
            parts = [(outputs_ND, self._output_rows(), all_rows_as_candidates(batch.target_ids_N, bias_V))]
        with torch.no_grad():
            return [self._softmax(*part) for part in parts]

    def _loss_of_targets(self, outputs_ND: Tensor, parts: Sequence[GroupInputs], batch: Batch) -> Tensor:
        """The loss summed over all targets."""
        softmaxes = [self._softmax(*part) for part in parts]
        if self.on_errors is not None:
            self.on_errors(batch.target_ids_N, torch.cat([softmax.top1_errors() for softmax in softmaxes]))
        losses = [softmax.loss() for softmax in softmaxes]
        return self._mix_losses(losses, Softmax.loss, outputs_ND, batch.target_ids_N, batch.weight_N)

    def _loss_of_auxiliary_targets(
        self, targets: Targets, micro: MicroBatch, rows: Sequence[Tensor], outputs_PD: Tensor
    ) -> Tensor:
        """The loss of an auxiliary objective's own targets, see `auxiliary.TargetsLoss`."""
        parts = _split_groups(outputs_PD, rows, micro.auxiliary_candidates)
        losses = [self._softmax(*part).loss() for part in parts]
        return self._mix_losses(losses, Softmax.loss, outputs_PD, targets.ids_P)

    def _loss_of_auxiliary_bags(
        self, targets: Targets, micro: MicroBatch, rows: Sequence[Tensor], outputs_PD: Tensor
    ) -> Tensor:
        """The bag-of-words loss of an auxiliary objective's own targets, each row a text, see
        `auxiliary.ForwardContext.bag_loss`."""
        texts = Texts(targets.index_P, *micro.batch.input_ids_BT.shape)
        parts = _split_groups(outputs_PD, rows, micro.auxiliary_candidates)
        texts_of_groups = texts.split([len(candidates.target_N) for _, _, candidates in parts])
        losses = [bag_loss(self._softmax(*part), own) for part, own in zip(parts, texts_of_groups, strict=True)]
        return self._mix_losses(losses, partial(bag_loss, texts=texts), outputs_PD, targets.ids_P)

    def _loss_among_candidates(
        self, micro: MicroBatch, rows: Sequence[Tensor], outputs_ND: Tensor, weight_N: Tensor
    ) -> Tensor:
        """The loss of other outputs for the batch's targets, see `auxiliary.CandidatesLoss`."""
        weights = weight_N.split([group.target_N.numel() for group in micro.candidates])
        groups = [replace(group, weight_N=part) for group, part in zip(micro.candidates, weights, strict=True)]
        losses = [self._softmax(*part).loss() for part in _split_groups(outputs_ND, rows, groups)]
        return self._mix_losses(losses, Softmax.loss, outputs_ND, micro.batch.target_ids_N, weight_N)

    def _mix_losses(
        self,
        losses: list[Tensor],
        loss_of: Callable[[Softmax], Tensor],
        outputs_ND: Tensor,
        ids_N: Tensor,
        weight_N: Tensor | None = None,
    ) -> Tensor:
        """The sum of the groups' losses, mixed with that over all ids if there is a `vanilla_weight`."""
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        share = self.objective.vanilla_weight
        if share:
            all_ids = all_rows_as_candidates(ids_N, weight_N=weight_N)
            loss = (1 - share) * loss + share * loss_of(self._softmax(outputs_ND, self._output_rows(), all_ids))
        return loss

    def _softmax(self, outputs_ND: Tensor, rows_wD: Tensor, candidates: Candidates) -> Softmax:
        """The softmax of outputs over candidates; over all ids with a vanilla head's transform and learned bias."""
        is_vocabulary, bias_V = candidates.ids_U is None, None
        if is_vocabulary and self.mask_head is not None:
            outputs_ND, bias_V = self.mask_head(outputs_ND), self.mask_head.bias
        if is_vocabulary and self.output_bias is not None:
            bias_V = self.output_bias.bias
        if bias_V is not None:
            candidates = replace(candidates, bias_U=bias_V[: self.vocab_size], target_logit_has_bias=True)
        return Softmax(outputs_ND, rows_wD, candidates, self._score(), self._shard(candidates))

    def _shard(self, candidates: Candidates) -> CandidateShard | None:
        """This rank's share of the candidates: an even one, or for the whole vocabulary the rows that it owns; None
        without tensor parallelism."""
        if self.group.size == 1:
            return None
        if candidates.ids_U is None:
            return CandidateShard.of(self.vocab_size, len(self._output_rows()), self.group)
        count = candidates.ids_U.numel()
        return CandidateShard.of(count, self._shard_width(count), self.group)

    def _shard_width(self, num_candidates: int) -> int:
        """The number of candidates per rank, padding included."""
        return max(1, -(-num_candidates // self.group.size))

    def _embed_inputs_and_candidates(
        self, input_ids_BT: Tensor, per_group: tuple[Candidates, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Embeddings of the inputs [B, T, D], and rows of this rank's share of each group's candidates [w, D]. If the
        candidates are the whole vocabulary, their rows are the output matrix."""
        ids = [candidates.ids_U for candidates in per_group if candidates.ids_U is not None]
        if not ids:
            return self.backbone.embed(input_ids_BT), [self._output_rows() for _ in per_group]
        if self.objective.candidates == "input":
            return self._look_up(self.backbone.embedding, input_ids_BT, ids)
        assert self.head is not None
        return self.backbone.embed(input_ids_BT), self._look_up(self.head, input_ids_BT[:0], ids)[1]

    def _look_up(
        self, table: nn.Embedding, input_ids_BT: Tensor, candidate_ids: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """These embeddings and rows from `table`, in one lookup."""
        if self.group.size == 1:
            embeddings = table(torch.cat([input_ids_BT.flatten(), *candidate_ids]))
            inputs_MD, *rows = embeddings.split([input_ids_BT.numel(), *map(len, candidate_ids)])
            return inputs_MD.unflatten(0, input_ids_BT.shape), rows
        id_shards = [self._shard_ids(ids_U) for ids_U in candidate_ids]
        scattered_ids = torch.cat(id_shards, dim=1).flatten()  # by rank, then by candidate group
        inputs_BTD, rows_WD = table(input_ids_BT, scattered_ids)
        return inputs_BTD, list(rows_WD.split([ids_Rw.shape[1] for ids_Rw in id_shards]))

    def _shard_ids(self, ids_U: Tensor) -> Tensor:
        """[ranks, w]: the ids split evenly, padded with -1."""
        width = self._shard_width(len(ids_U))
        return F.pad(ids_U, (0, width * self.group.size - len(ids_U)), value=-1).view(self.group.size, width)

    def _outputs(self, inputs_BTD: Tensor, batch: Batch) -> Tensor:
        """[N, D]: the hidden states of the targets."""
        return self._hidden_at(target_positions_of(batch), inputs_BTD, batch)

    def _outputs_and_hidden(self, inputs_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[N, D]: the hidden states of the targets; if the auxiliary objective needs them, [M, D]: of all tokens, or
        [B, D]: of the rows' first tokens."""
        auxiliary = self.auxiliary
        if auxiliary is not None and auxiliary.needs_all_outputs:
            hidden_MD = self._hidden_at(all_positions_of(batch), inputs_BTD, batch)
            return hidden_MD.index_select(0, batch.target_index_N), hidden_MD, None
        if auxiliary is None or not auxiliary.needs_first_outputs:
            return self._outputs(inputs_BTD, batch), None, None
        positions, order = target_and_first_positions_of(batch)
        hidden = self._hidden_at(positions, inputs_BTD, batch).index_select(0, order)
        outputs_ND, first_BD = hidden.split([len(batch.target_index_N), len(batch.input_ids_BT)])
        return outputs_ND, None, first_BD

    def _hidden_at(self, positions: TargetPositions, inputs_BTD: Tensor, batch: Batch) -> Tensor:
        """[N, D]: the hidden states at `positions`, from the generator if there is one, else from the backbone."""
        return self.backbones()[-1].encode_at(inputs_BTD, documents_of(batch), positions, token_subsets_of(batch))

    def _score(self) -> Score:
        """The objective's score, with the fixed or learned temperature."""
        return SCORES[self.objective.score](self.temperature or self.objective.temperature)

    def _evaluation_sums(self, request: EvaluationRequest) -> EvaluationSums:
        outputs = [self._outputs(self.backbone.embed(batch.input_ids_BT), batch) for batch in request.batches]
        outputs_ND, target_ids_N = torch.cat(outputs), torch.cat([batch.target_ids_N for batch in request.batches])
        weights = [batch.weight_N for batch in request.batches if batch.weight_N is not None]
        weight_N = torch.cat(weights) if weights else None
        vocabulary = all_rows_as_candidates(target_ids_N, request.bias_V, weight_N)
        if (blocks := self.backbone.embedding_blocks(self.vocab_size)) is not None:
            # a sharded embedding, which no vanilla softmax has
            sums = streamed_sums(outputs_ND, blocks, vocabulary, self._score())
        else:
            sums = self._softmax(outputs_ND, self._output_rows(), vocabulary).sums()
        if self.auxiliary is None or not self.auxiliary.is_evaluated:
            return sums
        return sums._replace(auxiliary=self._auxiliary_sums(self.auxiliary, outputs, request))

    def _auxiliary_sums(
        self, auxiliary: Auxiliary, outputs: Sequence[Tensor], request: EvaluationRequest
    ) -> dict[str, float]:
        """The auxiliary sums of all batches, with predictions over all ids."""
        sums: dict[str, Tensor] = {}
        for batch, outputs_nD in zip(request.batches, outputs, strict=True):
            inputs_BTD = self.backbone.embed(batch.input_ids_BT)
            needs_outputs = auxiliary.needs_all_outputs or auxiliary.needs_first_outputs
            _, hidden_MD, first_BD = self._outputs_and_hidden(inputs_BTD, batch) if needs_outputs else (None,) * 3
            predictions = partial(self._predictions, (), outputs_nD, batch)
            context = ForwardContext(
                self.backbone, batch, inputs_BTD, outputs_nD, hidden_MD, predictions, request.bias_V, False, first_BD
            )
            for name, value in auxiliary.compute_sums(context).items():
                sums[name] = sums[name] + value if name in sums else value
        return {name: float(value) for name, value in sums.items()}

    def _output_rows(self) -> Tensor:
        """[V, D]: the output matrix (the input embedding unless there is a head) without padding. With tensor
        parallelism this rank's rows, including padding, which `_shard` excludes."""
        matrix: Tensor = (self.backbone.embedding if self.head is None else self.head).weight
        return matrix[: self.vocab_size] if self.group.size == 1 else matrix


def _split_groups(outputs_ND: Tensor, rows: Sequence[Tensor], candidates: Sequence[Candidates]) -> list[GroupInputs]:
    """Each candidate group's softmax inputs; `outputs_ND`: the outputs of all groups, in order."""
    sizes = [group.target_N.numel() for group in candidates]
    return list(zip(outputs_ND.split(sizes), rows, candidates, strict=True))


TEMPERATURE = "temperature.log_value"


def build_pretraining(config: RunConfig) -> Pretraining:
    """The full model on torch's default device, with uninitialized weights."""
    model, objective = config.model_with_mask_decoder(), config.objective
    head = Embedding(model.padded_vocab_size(), model.hidden_size) if objective.trains_head() else None
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
    """The initial values of a new run's parameters, by name: full fp32 CPU tensors.

    Each is generated when it is read, and depends only on `config.seed` and its name.
    """

    config: RunConfig
    shapes: Mapping[str, torch.Size]

    def read(self, name: str, /) -> Tensor:
        """The initial value of the parameter `name`."""
        if name == TEMPERATURE:
            return LearnedTemperature(self.config.objective.temperature).initial_value()
        return initial_value(name, self.shapes[name], self.config.seed, self._model_of(name))

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        """The same, bit for bit, in blocks of rows."""
        if name == TEMPERATURE:
            return iter([self.read(name)])
        return initial_blocks(name, self.shapes[name], self.config.seed, self._model_of(name))

    def _model_of(self, name: str) -> ModelConfig:
        """The config of the model, or of the generator, that has the parameter."""
        generator = self.config.generator_config() if ".generator." in name else None
        return generator or self.config.model_with_mask_decoder()


def initial_weights(config: RunConfig) -> InitialWeights:
    """The initial weights of a run of `config`; generates none yet."""
    return InitialWeights(config, weight_shapes(config))


def build_parallel_model(config: RunConfig, group: Group, device: torch.device) -> Pretraining:
    """The model of `config`, split over `group`. Its parameters have a shape on `device`, but no memory.

    `load_weights_` allocates and sets them; so does an engine, which may partition them further. No rank allocates the
    full model. With one rank the layers are the plain ones. Parameters that `init.mode` freezes need no gradients. No
    communication.
    """
    with torch.device("meta"):
        module = build_pretraining(config)
        if group.size > 1:
            _parallelize_(module, config, group)
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            scalar = torch.zeros((), dtype=parameter.dtype, device=device)
            setattr(layer, name, nn.Parameter(scalar.expand(parameter.shape)))
    for name in shard_dims(module):
        module.get_parameter(name).model_parallel = True  # type: ignore[attr-defined]  # lost with the meta parameters
    if config.freezes_body():
        module.backbone.requires_grad_(False)
        module.backbone.embedding.requires_grad_(not config.freezes_embedding())
    return module


def load_weights_(module: nn.Module, group: Group, weights: TensorSource) -> None:
    """Allocates every parameter, and sets it to this rank's slice of the full tensor of its name.

    Additional memory: a block of one parameter, or all of one whose columns are split.
    """
    dims = shard_dims(module)
    for name, parameter in module.named_parameters():
        part = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if dims.get(name):  # another dim than the rows
            part.copy_(group.shard(weights.read(name), dims[name]).detach())
        else:
            copy_rows_(part, weights.blocks(name), group.rank * len(part) if name in dims else 0)
        parameter.data = part


def _parallelize_(module: Pretraining, config: RunConfig, group: Group) -> None:
    sharding, sequence = SHARDING[config.model.family], config.parallel.sequence
    parallelize_(module.backbone, sharding, group, sequence=sequence)
    for generator in module.backbones()[1:]:
        generator_sharding = {pattern: style for pattern, style in sharding.items() if pattern != "embedding"}
        parallelize_(generator, generator_sharding, group, sequence=sequence)
    if module.head is not None:
        parallelize_(module, {"head": "vocabulary"}, group)
    module.group = group
