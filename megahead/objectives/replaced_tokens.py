"""What replaced-token detection trains beside the backbone: a generator, and a head that says which tokens it replaced.

B rows, T tokens a row, D features, N targets, P judged tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.model import ModelConfig
from megahead.data.batch import Batch
from megahead.losses.detection import DetectionSums, detection_sums
from megahead.losses.softmax import Softmax
from megahead.models.backbone import Backbone
from megahead.models.registry import build_backbone
from megahead.objectives.micro_batch import documents_of


class DetectionHead(nn.Module):
    """ELECTRA's (`ElectraDiscriminatorPredictions` of transformers): score(gelu(dense h))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.score = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_PD: Tensor) -> Tensor:
        """[P]: log-odds of having been replaced."""
        logits_P1: Tensor = self.score(F.gelu(self.dense(hidden_PD), approximate=self.approximate))
        return logits_P1.squeeze(1)


class Detection(nn.Module):
    """The generator learns the masked tokens; the loss of what `head` makes of the backbone's output counts `weight`
    times beside its own."""

    def __init__(self, generator: ModelConfig, weight: float) -> None:
        """`generator`: its shape, of the backbone's width."""
        super().__init__()
        self.generator = without_table(build_backbone(generator))
        self.head = DetectionHead(generator)
        self.weight = weight

    def sums(
        self, backbone: Backbone, inputs_BTD: Tensor, batch: Batch, predictions: Sequence[Softmax]
    ) -> DetectionSums[Tensor]:
        """How well `backbone` finds tokens drawn from the generator's `predictions` of the targets (one for each
        candidate group), where they are not the targets themselves.

        inputs_BTD: the embedded inputs, in which the drawn tokens' rows take the places of the targets."""
        assert batch.replaced is not None
        drawn_ids_N, drawn_rows_ND = drawn_tokens(backbone, predictions, batch.replaced.draw_N)
        flat = inputs_BTD.flatten(0, 1).index_copy(0, batch.target_index_N, drawn_rows_ND)
        hidden_BTD = backbone.encode(flat.view_as(inputs_BTD), documents_of(batch))
        judged_P, replaced_M = batch.replaced.judged_P, batch.input_ids_BT.new_zeros(len(flat), dtype=torch.bool)
        replaced_M[batch.target_index_N] = drawn_ids_N != batch.target_ids_N
        logits_P = self.head(hidden_BTD.flatten(0, 1).index_select(0, judged_P))
        return detection_sums(logits_P, replaced_M[judged_P])


def drawn_tokens(backbone: Backbone, predictions: Sequence[Softmax], uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [N]: ids drawn from predictions of N outputs; [N, D]: their rows of the embedding, which learn."""
    shares = uniform_N.split([len(prediction.outputs_ND) for prediction in predictions])
    drawn = [_drawn_from(backbone, *each) for each in zip(predictions, shares, strict=True)]
    ids_N, rows_ND = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return ids_N, rows_ND


def _drawn_from(backbone: Backbone, prediction: Softmax, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    place_N, ids_U = prediction.draws(uniform_N), prediction.candidates.ids_U
    if ids_U is None:  # of all ids; an output matrix of its own has not the embedding's rows
        return place_N, backbone.embed(place_N)
    return ids_U[place_N], prediction.rows_at(place_N)


def without_table(backbone: Backbone) -> Backbone:
    """`backbone`, which reads rows that another one has looked up in its table."""
    del backbone.embedding
    return backbone
