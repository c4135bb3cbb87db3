"""Every rank's share is kept on another node, by one rank each."""

from __future__ import annotations

import pytest

from megahead.checkpoints.memory import Keepers


@pytest.mark.parametrize("nodes", ["aabb", "ab", "abc", "aaab", "abbb", "aabbbcc", "abab"])
def test_each_rank_has_a_keeper_on_the_next_node_and_nodes_share_the_work(nodes: str) -> None:
    keepers = Keepers(nodes)
    ranks = range(len(nodes))
    assert all(nodes[keepers.of(rank) or 0] != nodes[rank] for rank in ranks)
    assert sorted(ward for rank in ranks for ward in keepers.wards(rank)) == list(ranks)
    for node in set(nodes):
        loads = [len(keepers.wards(rank)) for rank in keepers.on(node)]
        assert max(loads) - min(loads) <= 1


def test_on_one_node_nobody_has_one() -> None:
    keepers = Keepers("aaa")
    assert [keepers.of(rank) for rank in range(3)] == [None] * 3
    assert keepers.wards(0) == []
