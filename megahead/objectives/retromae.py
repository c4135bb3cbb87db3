"""RetroMAE (Xiao et al. 2022, arXiv 2205.12035): a decoder of one layer reconstructs a text from the hidden state of
its [CLS] and some of its tokens, so that this state learns to represent the text. In DupMAE (Xiao et al. 2022, arXiv
2211.08769) the hidden states of the tokens predict the text's set of tokens, too. In TSDAE (Wang, Reimers and Gurevych
2021, arXiv 2104.06979) the encoder reads a part of the text. Only the encoder is exported.

B rows, T tokens per row, M = B T, D features, H heads of d dimensions, N masked tokens, P tokens that the decoder
predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.data.samples import CounterRng, Purpose
from megahead.models.attention_backends import attend_with_mask
from megahead.models.layers import MLP, Embedding, LayerNorm
from megahead.objectives.auxiliary import Auxiliary, ForwardContext, Targets
from megahead.objectives.micro_batch import documents_of


class RetroMAEBatch(NamedTuple):
    """The prepared tensors of a batch."""

    targets: Targets
    """All but special tokens of each row's first document, which [CLS] attends to."""

    draws_BT: Tensor
    """uint8: a random number of each token."""

    shifts_BT: Tensor
    """uint8: a random number of each position."""


class TextDecoder(Auxiliary):
    """Base of objectives that add the loss of an `EnhancedDecoder` for the `targets` that they prepare, by the run's
    objective: headless, with these targets as candidates for each other, or vanilla."""

    needs_first_outputs = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.decoder = EnhancedDecoder(config.model)

    @classmethod
    def targets(cls, batch: Batch) -> Targets:
        """The tokens that the decoder predicts."""
        targets: Targets = batch.auxiliary.targets
        return targets


class RetroMAE(TextDecoder):
    """At each position the decoder sees other random tokens of the text."""

    module_name = "retromae"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        settings = config.objective.retromae
        assert settings is not None
        self._bag_factor = settings.bag_weight / settings.weight
        self._visible_of_256 = round(256 * (1 - settings.decoder_rate))

    @classmethod
    def prepare(cls, batch: Batch, config: RunConfig, rng: CounterRng) -> RetroMAEBatch:
        """Masked tokens are predicted, too; random numbers depend only on the sample."""
        length = batch.input_ids_BT.shape[1]
        bytes_BT = torch.from_numpy((rng.uniform(Purpose.RETROMAE, 2 * length) * 256).astype(np.uint8))
        return RetroMAEBatch(first_document_targets(unmasked_ids(batch), batch, config), *bytes_BT.split(length, dim=1))

    def sums(self, context: ForwardContext) -> Mapping[str, Tensor]:
        """`loss` of the decoder's predictions, and their `count`; with a `bag_weight` also `bag`, the bag-of-words
        loss. `loss` includes it, scaled to `bag_weight`."""
        batch, prepared, hidden_MD = context.batch, context.batch.auxiliary, context.hidden_MD
        first_BD = context.first_BD if hidden_MD is None else hidden_MD.view_as(context.inputs_BTD)[:, 0]
        assert first_BD is not None
        assert context.targets_loss is not None
        text_ND = context.backbone.embed(batch.target_ids_N)
        text_MD = context.inputs_BTD.flatten(0, 1).index_copy(0, batch.target_index_N, text_ND)
        mask_BTT = visible_tokens(prepared.draws_BT, prepared.shifts_BT, in_first_document(batch), self._visible_of_256)
        text_BTD = text_MD.view_as(context.inputs_BTD)
        outputs_PD = self.decoder(first_BD, text_BTD, mask_BTT, prepared.targets.index_P)
        count = torch.full((), len(outputs_PD), device=outputs_PD.device)
        loss = context.targets_loss(outputs_PD)
        if hidden_MD is None:
            return {"loss": loss, "count": count}
        assert context.bag_loss is not None
        bag = context.bag_loss(hidden_MD.index_select(0, prepared.targets.index_P))
        return {"loss": loss + self._bag_factor * bag, "bag": bag.detach(), "count": count}


# Enhanced decoding (section 3.3 of the paper). With h the hidden state of [CLS], e_j the embedding of token j of the
# text and p_j a learned position, position i has the query of H1 and the keys and values of H2:
#
#     H1_i = h + p_i        H2 = [h, e_1 + p_1, ..., e_(T-1) + p_(T-1)]
#     A = softmax(Q(H1) K(H2)^T / sqrt(d) + M) V(H2)
#     M_ij = 0 for j = 0 and for a visible j != i, else -inf
#
# The output of a post-norm block with A as attention and H1 as residual is scored against the candidates. Each position
# draws its own visible tokens, so that each learns from a different context. Not in the paper: the decoder has its own
# position embeddings, since not every family has them; they and the token embeddings are normed, since h is.


class EnhancedDecoder(nn.Module):
    """The decoder's layer, as wide as the model's. Replicated on all tensor ranks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        linear = partial(nn.Linear, hidden_size, hidden_size)
        norm = partial(LayerNorm, hidden_size, eps=config.norm_eps)
        self.num_heads, self.dropout = config.num_heads, config.hidden_dropout
        self.positions = Embedding(config.max_positions, hidden_size)
        self.position_norm, self.text_norm = norm(), norm()
        self.query, self.key, self.value, self.output = linear(), linear(), linear(), linear()
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.mlp = MLP(hidden_size, config.mlp_size(), config.activation)

    def forward(self, first_BD: Tensor, text_BTD: Tensor, mask_BTT: Tensor, index_P: Tensor) -> Tensor:
        """[P, D]: the outputs at the positions `index_P` of all B * T, from the hidden states of [CLS] `first_BD`.

        text_BTD: embeddings of the row, of which the first, that of [CLS], is not read. mask_BTT: bool, whether a
        position (dim 1) sees a token (dim 2).
        """
        first_B1D = first_BD[:, None]
        positions_TD = self.position_norm(self.positions(torch.arange(text_BTD.shape[1], device=text_BTD.device)))
        queries_BTD = first_B1D + positions_TD
        memory_BTD = torch.cat([first_B1D, self.text_norm(text_BTD[:, 1:]) + positions_TD[1:]], dim=1)
        projections = (self.query, queries_BTD), (self.key, memory_BTD), (self.value, memory_BTD)
        q, k, v = (layer(x_BTD).unflatten(-1, (self.num_heads, -1)) for layer, x_BTD in projections)
        attended_BTD = attend_with_mask(q, k, v, mask_BTT).flatten(-2)
        queries_PD, attended_PD = (x.flatten(0, 1).index_select(0, index_P) for x in (queries_BTD, attended_BTD))
        hidden_PD = self.attention_norm(queries_PD + self._dropout(self.output(attended_PD)))
        outputs_PD: Tensor = self.mlp_norm(hidden_PD + self._dropout(self.mlp(hidden_PD)))
        return outputs_PD

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def unmasked_ids(batch: Batch) -> Tensor:
    """int64 [B, T]: the rows before tokens were masked."""
    ids_M = batch.input_ids_BT.flatten().index_copy(0, batch.target_index_N, batch.target_ids_N)
    return ids_M.view_as(batch.input_ids_BT)


def first_document_targets(ids_BT: Tensor, batch: Batch, config: RunConfig) -> Targets:
    """All but special tokens of `ids_BT` (on the CPU) in the first documents of the batch's rows."""
    assert config.masking is not None
    is_target_BT = ~np.isin(ids_BT.numpy(), config.masking.unmaskable_ids(config.data.end_token))
    index_P = torch.from_numpy(np.flatnonzero(is_target_BT & in_first_document(batch).numpy()))
    return Targets(index_P, ids_BT.flatten()[index_P])


def visible_tokens(draws_BT: Tensor, shifts_BT: Tensor, in_document_BT: Tensor, visible: int) -> Tensor:
    """[B, T, T] bool: whether a position sees a token: always the first, never its own, and others `in_document_BT`
    (bool [B, T]) with probability `visible` / 256.

    Position i sees token j if (draw_j + shift_i) modulo 256 is below `visible`. For one position, tokens are drawn
    independently. A row takes 2 T random numbers instead of T^2.
    """
    sums_BTT = draws_BT[:, None, :] + shifts_BT[:, :, None]  # uint8 wraps around
    visible_BTT = (sums_BTT.to(torch.int16) < visible) & in_document_BT[:, None, :]
    visible_BTT.diagonal(dim1=1, dim2=2).fill_(False)
    visible_BTT[:, :, 0] = True
    return visible_BTT


def in_first_document(batch: Batch) -> Tensor:
    """[B, T] bool: the tokens of each row's first document; [1, T] if each row is one document."""
    positions_BT = documents_of(batch).positions_BT
    return positions_BT == torch.arange(positions_BT.shape[1], device=positions_BT.device)


# TSDAE: most tokens of a text are deleted before the encoder reads it, and the decoder predicts each token of the whole
# text from the hidden state of [CLS] and the tokens before it. Two things differ from the paper: the decoder is
# RetroMAE's, of one layer; and masked tokens are targets of the encoder, and are not deleted.


class TSDAEBatch(NamedTuple):
    """The prepared tensors of a batch."""

    targets: Targets
    """All but special tokens of each row's first document, at their positions before deletion."""

    text_BT: Tensor
    """int64: the rows before tokens were masked and deleted."""


class TSDAE(TextDecoder):
    """The decoder sees the tokens before its own."""

    module_name = "tsdae"

    @classmethod
    def extend(cls, batch: Batch, config: RunConfig, rng: CounterRng) -> Batch:
        """Deletes unmasked tokens that the decoder predicts; random numbers depend only on the sample."""
        settings, text_BT = config.objective.tsdae, unmasked_ids(batch)
        assert settings is not None
        targets = first_document_targets(text_BT, batch, config)
        draw_BT = torch.from_numpy(rng.uniform(Purpose.TSDAE, text_BT.shape[1]))
        is_deletable_BT = torch.zeros_like(text_BT, dtype=torch.bool)
        is_deletable_BT.view(-1)[targets.index_P] = True
        is_deletable_BT.view(-1)[batch.target_index_N] = False
        shorter = delete_tokens(batch, is_deletable_BT & (draw_BT < settings.deletion_rate), config.data.end_token)
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
    """The batch without the tokens `deleted_BT` (bool), which are in its rows' first documents and no targets.

    Later tokens move left, with their targets and `token_subsets` (the only tokens that some layers compute). Positions
    in the first document are renumbered from 0; other documents keep theirs. End tokens fill a row as a separate
    document, like padding.
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
