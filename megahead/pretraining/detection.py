"""What replaced-token detection trains beside the backbone: a generator, and a head that says which tokens it replaced.

B rows, T tokens a row, D features, N targets, P judged tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config import ModelConfig
from megahead.data import Batch
from megahead.models import Backbone, build_backbone
from megahead.objectives import DetectionSums, detection_sums
from megahead.pretraining.batch import documents_of


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
        self, backbone: Backbone, inputs_BTD: Tensor, batch: Batch, drawn_ids_N: Tensor, drawn_rows_ND: Tensor
    ) -> DetectionSums[Tensor]:
        """How well `backbone` finds the drawn tokens that are not the targets themselves.

        inputs_BTD: the embedded inputs, in which the drawn tokens' rows take the places of the targets."""
        assert batch.replaced is not None
        flat = inputs_BTD.flatten(0, 1).index_copy(0, batch.target_index_N, drawn_rows_ND)
        hidden_BTD = backbone.encode(flat.view_as(inputs_BTD), documents_of(batch))
        judged_P, replaced_M = batch.replaced.judged_P, batch.input_ids_BT.new_zeros(len(flat), dtype=torch.bool)
        replaced_M[batch.target_index_N] = drawn_ids_N != batch.target_ids_N
        logits_P = self.head(hidden_BTD.flatten(0, 1).index_select(0, judged_P))
        return detection_sums(logits_P, replaced_M[judged_P])


def without_table(backbone: Backbone) -> Backbone:
    """`backbone`, which reads rows that another one has looked up in its table."""
    del backbone.embedding
    return backbone
