"""The module that is trained: one embedding lookup, the backbone, and a softmax over candidates.

In a headless run (contrastive weight tying) the candidates are the input embeddings of a candidate group's targets;
such a group is consecutive samples. In a vanilla run they are the whole vocabulary.

B rows, T inputs a row, D features, N targets, U candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor, nn

from megahead.config import ObjectiveConfig
from megahead.data import Batch
from megahead.models import Backbone
from megahead.nn import TargetPositions
from megahead.objectives import (
    SCORES,
    Candidates,
    DetectionSums,
    EvaluationSums,
    Score,
    streamed_sums,
    vocabulary_candidates,
)
from megahead.pretraining.batch import (
    EvaluationRequest,
    MicroBatch,
    all_positions_of,
    documents_of,
    shorter_rows_of,
    target_positions_of,
)
from megahead.pretraining.detection import Detection
from megahead.pretraining.output_layers import MaskHead, OutputBias, OutputEmbedding
from megahead.pretraining.phrases import PhraseLoss
from megahead.pretraining.softmax import Softmax
from megahead.pretraining.temperature import LearnedTemperature
from megahead.table import RowTable

Part = tuple[Tensor, Tensor, Candidates]
"""Outputs of targets of one candidate group, and its candidates with their rows."""

NotesMisses = Callable[[Tensor, Tensor], None]
NotesDetection = Callable[[DetectionSums[Tensor]], None]


class Pretraining(nn.Module):
    """`backbone` trained by `objective`: a MicroBatch gives its weighted loss, an EvaluationRequest its
    EvaluationSums.

    Both go through `forward`, because under ZeRO-3 weights exist only there. Rows of the embedding from `vocab_size` on
    are padding: never candidates. `mask_head` transforms an encoder's outputs before the softmax over the vocabulary.
    `note_misses`, where something wants to know, is told the targets of each training batch, int64 [N], and which of
    them another candidate beat, bool [N]; that costs a third of the loss once more.

    With `detection` its generator learns the targets in the backbone's place, and the backbone which tokens of a text
    the generator has replaced; `note_detection` is told how well it does, batch by batch. `drawn_bias_V` is the bias of
    the head by which replacements are drawn from all ids, where they are. With `phrases` the outputs at
    the ends of masked phrases also learn to be like those of the same phrase in other rows.
    """

    def __init__(
        self,
        backbone: Backbone,
        objective: ObjectiveConfig,
        vocab_size: int,
        head: OutputEmbedding | None = None,
        mask_head: MaskHead | None = None,
        output_bias: OutputBias | None = None,
        detection: Detection | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.objective = objective
        self.vocab_size = vocab_size
        self.head = head
        self.mask_head = mask_head
        self.output_bias = output_bias
        self.detection = detection
        self.note_misses: NotesMisses | None = None
        self.note_detection: NotesDetection | None = None
        self.drawn_bias_V: Tensor | None = None
        self.phrases = PhraseLoss(objective.phrases) if objective.phrases else None
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
        return [self.backbone, *([] if self.detection is None else [self.detection.generator])]

    def _loss(self, micro: MicroBatch) -> Tensor:
        """Scalar, connected to every trained parameter, also when the micro-batch has no targets."""
        inputs_BTD, rows = self._look_up(micro.batch.input_ids_BT, micro.candidates)
        outputs_ND, phrase_loss = self._outputs_and_phrases(inputs_BTD, micro.batch)
        sizes = [candidates.positive_N.numel() for candidates in micro.candidates]
        parts = list(zip(outputs_ND.split(sizes), rows, micro.candidates, strict=True))
        loss = (self._loss_of_targets(outputs_ND, parts, micro.batch) + phrase_loss) * micro.loss_weight
        if self.detection is None:
            return loss
        predictions = self._drawn_from(outputs_ND, parts, micro.batch)
        sums = self.detection.sums(self.backbone, inputs_BTD, micro.batch, predictions)
        if self.note_detection is not None:
            self.note_detection(sums)
        return loss + self.detection.weight * micro.judged_weight * sums.loss

    def _drawn_from(self, outputs_ND: Tensor, parts: Sequence[Part], batch: Batch) -> list[Softmax]:
        """The predictions of targets from which tokens are drawn in their places, in the order of the targets."""
        asked = self.objective.replaced_tokens
        if asked is None or asked.draws == "group":
            return [self._prediction(*part) for part in parts]
        all_ids = vocabulary_candidates(batch.target_ids_N, self.drawn_bias_V)
        return [self._prediction(outputs_ND, self._output_rows(), all_ids)]

    def _loss_of_targets(self, outputs_ND: Tensor, parts: Sequence[Part], batch: Batch) -> Tensor:
        """The loss summed over all targets."""
        loss = torch.stack([self._loss_among(*part) for part in parts]).sum()
        if self.note_misses is not None:
            self.note_misses(batch.target_ids_N, torch.cat([self._prediction(*part).misses() for part in parts]))
        share = self.objective.vanilla_weight
        if share:
            all_ids = vocabulary_candidates(batch.target_ids_N, weight_N=batch.weight_N)
            vanilla = self._loss_among(outputs_ND, self._output_rows(), all_ids)
            loss = (1 - share) * loss + share * vanilla
        return loss

    def _loss_among(self, outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates) -> Tensor:
        """The loss summed over the outputs."""
        hidden_ND, bias_V = self._final_hidden(outputs_ND, candidates.ids_U is None)
        if bias_V is not None:
            candidates = replace(candidates, bias_U=bias_V, subtracts_positive_bias=True)
        return self._softmax(hidden_ND, rows_UD, candidates).loss()

    @torch.no_grad()
    def _prediction(self, outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates) -> Softmax:
        """What the outputs say of their targets: as in the loss, but that targets have a learned bias, too."""
        hidden_ND, bias_V = self._final_hidden(outputs_ND, candidates.ids_U is None)
        candidates = candidates if bias_V is None else replace(candidates, bias_U=bias_V)
        return self._softmax(hidden_ND, rows_UD, candidates)

    def _softmax(self, hidden_ND: Tensor, rows_UD: Tensor, candidates: Candidates) -> Softmax:
        return Softmax(hidden_ND, rows_UD, candidates, self._score())

    def _look_up(self, input_ids_BT: Tensor, per_group: tuple[Candidates, ...]) -> tuple[Tensor, list[Tensor]]:
        """Embeddings of the inputs [B, T, D], and of each candidate group [U, D], in one embedding call.

        If the candidates are the whole vocabulary, they are the rows of the output matrix.
        """
        sizes = [0 if candidates.ids_U is None else candidates.ids_U.numel() for candidates in per_group]
        ids = [candidates.ids_U for candidates in per_group if candidates.ids_U is not None]
        looked_up = self.backbone.embed(torch.cat([input_ids_BT.flatten(), *ids]))
        inputs, *rows = looked_up.split([input_ids_BT.numel(), *sizes])
        tables = [self._output_rows() if g.ids_U is None else r for g, r in zip(per_group, rows, strict=True)]
        return inputs.view(*input_ids_BT.shape, -1), tables

    def _outputs(self, inputs_BTD: Tensor, batch: Batch) -> Tensor:
        """[N, D]: the hidden states that have targets."""
        return self._hidden_at(target_positions_of(batch), inputs_BTD, batch)

    def _outputs_and_phrases(self, inputs_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """The same; and the loss of masked phrases, which compares the hidden states of all tokens."""
        if self.phrases is None:
            return self._outputs(inputs_BTD, batch), 0.0
        every_MD = self._hidden_at(all_positions_of(batch), inputs_BTD, batch)
        return every_MD.index_select(0, batch.target_index_N), self.phrases(every_MD, batch.phrases)

    def _hidden_at(self, wanted: TargetPositions, inputs_BTD: Tensor, batch: Batch) -> Tensor:
        """[N, D]: the hidden states there, of what learns the targets."""
        learner = self.backbone if self.detection is None else self.detection.generator
        return learner.encode_at(inputs_BTD, documents_of(batch), wanted, shorter_rows_of(batch))

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
        vocabulary, table = vocabulary_candidates(target_ids_N, bias_V, weight_N), self.backbone.embedding
        if isinstance(table, RowTable):
            return streamed_sums(hidden_ND, table.weight_blocks(self.vocab_size), vocabulary, self._score())
        sums = self._softmax(hidden_ND, self._output_rows(), vocabulary).sums()
        if self.detection is None:
            return sums
        of_targets = sums.loss, sums.correct, sums.targets, sums.weight
        return EvaluationSums(*of_targets, *self._detected_by_all(self.detection, outputs, request))

    def _detected_by_all(
        self, detection: Detection, outputs: Sequence[Tensor], request: EvaluationRequest
    ) -> DetectionSums[float]:
        """How well the backbone finds the tokens that the generator's head over the vocabulary draws."""
        sums = []
        for batch, outputs_nD in zip(request.batches, outputs, strict=True):
            inputs_BTD = self.backbone.embed(batch.input_ids_BT)
            all_ids = vocabulary_candidates(batch.target_ids_N, request.bias_V)
            prediction = self._prediction(outputs_nD, self._output_rows(), all_ids)
            sums.append(detection.sums(self.backbone, inputs_BTD, batch, [prediction]))
        return DetectionSums(*(float(sum(values)) for values in zip(*sums, strict=True)))

    def _output_rows(self) -> Tensor:
        """[V, D]: the output matrix without its padding."""
        return self._output_matrix().weight[: self.vocab_size]

    def _output_matrix(self) -> nn.Embedding | OutputEmbedding:
        """The matrix that outputs are multiplied by: the input embedding itself unless there is a head."""
        return self.backbone.embedding if self.head is None else self.head
