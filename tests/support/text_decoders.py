"""What decoders of texts compute, position by position and group by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.losses.candidates import Candidates
from megahead.losses.contrastive import build_objective
from megahead.losses.softmax import candidate_loss_reference
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import Pretraining


def in_groups(batch: Batch, config: RunConfig, groups: int = 2) -> MicroBatch:
    """The batch with candidates of groups of rows, for masked tokens and for the decoder's."""
    (rows, length), objective, found = batch.input_ids_BT.shape, build_objective(config.objective, 61), []
    for index_N, ids_N in ((batch.target_index_N, batch.target_ids_N), batch.auxiliary.targets):
        parts = [ids_N[index_N // length // (rows // groups) == group] for group in range(groups)]
        found.append(tuple(objective.candidate_set(part).candidates(part) for part in parts))
    return MicroBatch(batch, found[0], 0.25, 0.125, found[1])


def decoded(decoder: Any, first_D: Tensor, text_TD: Tensor, position: int, seen: Sequence[int]) -> Tensor:
    """[D]: the output at a position that sees [CLS] and these tokens of `text_TD`, head by head."""
    places, size = decoder.position_norm(decoder.positions.weight), first_D.shape[-1] // decoder.num_heads
    query, read = first_D + places[position], decoder.text_norm(text_TD[list(seen)]) + places[list(seen)]
    memory = torch.cat([first_D[None], read])
    q, k, v = decoder.query(query), decoder.key(memory), decoder.value(memory)
    heads = []
    for head in range(decoder.num_heads):
        part = slice(head * size, (head + 1) * size)
        heads.append(torch.softmax(k[:, part] @ q[part] / size**0.5, 0) @ v[:, part])
    hidden = decoder.attention_norm(query + decoder.output(torch.cat(heads)))
    output: Tensor = decoder.mlp_norm(hidden + decoder.mlp(hidden))
    return output


def loss_among(model: Pretraining, outputs: Tensor, groups: Sequence[Candidates]) -> Tensor:
    """Summed, with the groups' rows of the embedding, or with all of them."""
    total, place = outputs.sum() * 0, 0
    for group in groups:
        some = outputs[place : place + len(group.target_N)]
        place += len(some)
        if group.ids_U is not None:
            total = total + candidate_loss_reference(some, model.backbone.embedding.weight[group.ids_U], group)
        else:
            assert model.mask_head is not None
            logits = model.mask_head(some) @ model.backbone.embedding.weight[:61].T + model.mask_head.bias[:61]
            total = total + F.cross_entropy(logits, group.target_N, reduction="sum")
    assert place == len(outputs)
    return total


def assert_equal_with_gradients(loss: Tensor, model: Pretraining, expected: Tensor, slow: Pretraining) -> None:
    """`loss` of `model` is `expected` of `slow`, a copy of it, in float64, and so are the gradients of all weights."""
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    loss.backward()
    expected.backward()
    for (name, mine), theirs in zip(model.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10, msg=name)
