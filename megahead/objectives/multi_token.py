"""Multi-token prediction (Gloeckle et al. 2024, arXiv 2404.19737): parallel heads of one block each predict tokens
further ahead, among the candidates of the next tokens. Only the backbone is exported, without these heads.

B rows, T tokens per row, M = B T, D features, N targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.data.samples import CounterRng
from megahead.models.backbone import Backbone, PreNormBackbone
from megahead.models.documents import Documents
from megahead.models.families import build_backbone
from megahead.objectives.auxiliary import Auxiliary, ForwardContext
from megahead.objectives.micro_batch import documents_of

# Head k is a block of the model's family on the backbone's hidden states after the final norm, with a norm that the
# heads share. With z these states, n the norm and t_i the target at position i, the next token:
#
#     head k at position i predicts t_(i + k):    softmax over the candidates of t of n(block_k(z))_i
#
# So a head has the batch's N targets, and predicts each from the position k earlier. It has the same candidates, rows
# and biases, and nothing more is exchanged or looked up. Targets without a position k earlier in their document have
# weight 0. In the paper the next token has a head block of its own, too; here the backbone's last block serves as one.


class MultiToken(Auxiliary):
    """Adds the loss of the heads, by the run's objective: headless or vanilla."""

    module_name = "multi_token"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        settings = config.objective.multi_token
        assert settings is not None
        without_table = settings.head_blocks(config.model).model_copy(update={"vocab_size": 1, "vocab_multiple": 1})
        model = cast(PreNormBackbone, build_backbone(without_table))
        self.blocks, self.norm = model.blocks, model.final_norm

    @classmethod
    def prepare(cls, batch: Batch, config: RunConfig, rng: CounterRng) -> Tensor:
        """int64 [M]: how many heads predict each position's target."""
        assert config.objective.multi_token is not None
        return num_preceding_targets(batch).clamp(max=config.objective.multi_token.heads)

    @classmethod
    def num_loss_terms(cls, batch: Batch) -> int:
        """The targets of all heads."""
        heads_M: Tensor = batch.auxiliary
        return int(heads_M[batch.target_index_N].sum())

    def sums(self, context: ForwardContext) -> Mapping[str, Tensor]:
        """`loss` and `count` of all heads; `loss_J` and `count_J` of the head that predicts J tokens ahead."""
        batch, documents = context.batch, documents_of(context.batch)
        assert context.hidden_MD is not None
        assert context.candidates_loss is not None
        hidden_BTD = context.hidden_MD.view_as(context.inputs_BTD)
        heads_N = batch.auxiliary[batch.target_index_N]
        sums = {"loss": torch.zeros((), device=heads_N.device), "count": heads_N.sum()}
        for k in range(1, len(self.blocks) + 1):
            outputs_MD = self.outputs(k, hidden_BTD, documents, context.backbone).flatten(0, 1)
            outputs_ND = outputs_MD.index_select(0, (batch.target_index_N - k).clamp(min=0))
            has_target_N = heads_N >= k
            loss = context.candidates_loss(outputs_ND, has_target_N.float())
            sums |= {f"loss_{k + 1}": loss.detach(), f"count_{k + 1}": has_target_N.sum()}
            sums["loss"] = sums["loss"] + loss
        return sums

    def outputs(self, k: int, hidden_BTD: Tensor, documents: Documents, backbone: Backbone) -> Tensor:
        """[B, T, D]: the outputs of head k, computed as the backbone's last block computes its own."""
        arguments = backbone.block_arguments(documents)[-1]
        outputs_BTD: Tensor = self.norm(backbone.run_block(self.blocks[k - 1], hidden_BTD, *arguments))
        return outputs_BTD


def num_preceding_targets(batch: Batch) -> Tensor:
    """int64 [M]: how many positions directly before each one have a target without a gap, in its document (in its row,
    if documents attend to each other); 0 where it has no target itself. Heads may predict its target from these."""
    rows, length = batch.input_ids_BT.shape
    position_M = documents_of(batch).positions_BT.expand(rows, length).flatten().numpy()
    index_M = np.arange(len(position_M))
    has_target_M = np.zeros(len(position_M), bool)
    has_target_M[batch.target_index_N.numpy()] = True
    last_without_M = np.maximum.accumulate(np.where(has_target_M, -1, index_M))
    return torch.from_numpy(np.clip(np.minimum(position_M, index_M - last_without_M - 1), 0, None))
