"""TSDAE (Wang, Reimers and Gurevych 2021, arXiv 2104.06979): most tokens of a text are deleted before the encoder reads
it, and a decoder predicts each token of the whole text from the hidden state of [CLS] and the tokens before it, so that
this state learns to represent the text. Only the encoder is exported.

Not in the paper: the decoder is RetroMAE's, of one layer; masked tokens are learned as in every run, and stay.

B rows, T tokens per row, D features, N masked tokens, P tokens that the decoder predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.data.samples import CounterRng, Purpose
from megahead.objectives.auxiliary import ForwardContext, Targets
from megahead.objectives.micro_batch import documents_of
from megahead.objectives.retromae import TextDecoder, first_document_targets, unmasked_ids


class TSDAEBatch(NamedTuple):
    """The prepared tensors of a batch."""

    targets: Targets
    """All tokens of each row's first document but special ones, at their places before tokens were deleted."""

    text_BT: Tensor
    """int64: the rows before tokens were masked and deleted."""


class TSDAE(TextDecoder):
    """The decoder sees the tokens before its own."""

    key = "tsdae"

    @classmethod
    def extend(cls, batch: Batch, config: RunConfig, rng: CounterRng) -> Batch:
        """Deletes tokens that the decoder predicts, but masked ones; random numbers depend only on the sample."""
        settings, text_BT = config.objective.tsdae, unmasked_ids(batch)
        assert settings is not None
        targets = first_document_targets(text_BT, batch, config)
        draw_BT = torch.from_numpy(rng.uniform(Purpose.TSDAE, text_BT.shape[1]))
        may_go_BT = torch.zeros_like(text_BT, dtype=torch.bool)
        may_go_BT.view(-1)[targets.index_P] = True
        may_go_BT.view(-1)[batch.target_index_N] = False
        shorter = delete_tokens(batch, may_go_BT & (draw_BT < settings.deletion_rate), config.data.end_token)
        return replace(shorter, auxiliary=TSDAEBatch(targets, text_BT))

    def sums(self, context: ForwardContext) -> Mapping[str, Tensor]:
        """`loss` of the decoder's predictions, and their `count`."""
        (index_P, _), text_BT = context.batch.auxiliary
        assert context.first_BD is not None
        assert context.targets_loss is not None
        mask_1TT = earlier_tokens(text_BT.shape[1], text_BT.device)
        outputs_PD = self.decoder(context.first_BD, context.backbone.embed(text_BT), mask_1TT, index_P)
        count = torch.full((), len(outputs_PD), device=outputs_PD.device)
        return {"loss": context.targets_loss(outputs_PD), "count": count}


def earlier_tokens(length: int, device: torch.device) -> Tensor:
    """[1, T, T] bool: whether a position (dim 1) sees a token (dim 2): the first, whose place the hidden state of [CLS]
    takes, and those before its own."""
    mask_1TT = torch.ones(1, length, length, dtype=torch.bool, device=device).tril(-1)
    mask_1TT[:, :, 0] = True
    return mask_1TT


def delete_tokens(batch: Batch, deleted_BT: Tensor, end_token: int) -> Batch:
    """The batch without the tokens `deleted_BT` (bool) of its rows' first documents, none of which is a target.

    Later tokens move to the left, with their targets and token subsets. Positions in the first document count again
    from 0; other documents keep theirs. A row ends with end tokens as a document of its own, as padding is.
    """
    (rows, length), deleted_M, column_T = deleted_BT.shape, deleted_BT.flatten(), torch.arange(deleted_BT.shape[1])
    order_BT = deleted_BT.to(torch.uint8).argsort(dim=1, stable=True)  # the kept tokens, then the others
    new_index_M = (order_BT.argsort(dim=1) + length * torch.arange(rows)[:, None]).flatten()
    num_kept_B1 = (~deleted_BT).sum(1, keepdim=True)
    is_filled_BT = column_T >= num_kept_B1
    positions_BT = documents_of(batch).positions_BT.expand_as(order_BT).gather(1, order_BT)
    positions_BT = torch.minimum(positions_BT, column_T)  # which lowers those of the first document alone
    return replace(
        batch,
        input_ids_BT=batch.input_ids_BT.gather(1, order_BT).masked_fill(is_filled_BT, end_token),
        positions_BT=torch.where(is_filled_BT, column_T - num_kept_B1, positions_BT),
        target_index_N=new_index_M[batch.target_index_N],
        token_subsets=tuple(
            subset._replace(index_N=new_index_M[subset.index_N[~deleted_M[subset.index_N]]])
            for subset in batch.token_subsets
        ),
    )
