"""A head that a checkpoint does not have yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megahead.checkpoints.reading import open_checkpoint
from megahead.distributed.group import Group
from megahead.train.start import WithInitialHead
from support.saved import save_checkpoint

EMBEDDING = torch.arange(12.0).reshape(4, 3)


@pytest.fixture
def tensors(tmp_path: Path) -> WithInitialHead:
    stored = {f"{kind}/backbone.embedding.weight": EMBEDDING + 1 * (kind != "weight") for kind in ("weight", "exp_avg")}
    save_checkpoint(tmp_path, 5, stored.items(), state={}, config={}, group=Group())
    return WithInitialHead(open_checkpoint(tmp_path))


@pytest.mark.parametrize("key", ["weight/head.weight", "late/weight/head.weight"])
def test_it_starts_as_the_embedding_whoever_asks(tensors: WithInitialHead, key: str) -> None:
    assert torch.equal(tensors.read(key), EMBEDDING)
    assert torch.equal(torch.cat(list(tensors.blocks(key))), EMBEDDING)


def test_its_moments_are_zero_and_what_is_stored_comes_as_it_is(tensors: WithInitialHead) -> None:
    assert torch.equal(tensors.read("exp_avg/head.weight"), torch.zeros(4, 3))
    assert torch.equal(tensors.read("exp_avg/backbone.embedding.weight"), EMBEDDING + 1)
