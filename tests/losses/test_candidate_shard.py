"""Candidates split over ranks."""

from __future__ import annotations

import pytest
import torch

from megahead.distributed.group import Group
from megahead.losses.softmax import CandidateShard


@pytest.mark.parametrize("total", [0, 1, 7, 8])
def test_shards_cover_all_candidates_once_in_tables_of_one_width(total: int) -> None:
    shards = [CandidateShard.of(total, 2, Group(rank, 4)) for rank in range(4)]
    bias = torch.arange(total) + 1.0
    slices = [shard.slice(bias) for shard in shards]
    assert torch.equal(torch.cat([part[: shard.count] for part, shard in zip(slices, shards, strict=True)]), bias)
    assert all(len(part) == 2 and not part[shard.count :].any() for part, shard in zip(slices, shards, strict=True))
    last = shards[-1].slice(bias, pad_value=-torch.inf)
    assert last is not None
    assert (last[shards[-1].count :] == -torch.inf).all()
    assert shards[0].slice(None) is None
