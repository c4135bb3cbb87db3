"""Every rank's share is kept on another node, by one rank each."""

from __future__ import annotations

import pytest

from megahead.checkpoints.memory import Peers


@pytest.mark.parametrize("nodes", ["aabb", "ab", "abc", "aaab", "abbb", "aabbbcc", "abab"])
def test_each_rank_has_a_peer_on_the_next_node_and_nodes_share_the_work(nodes: str) -> None:
    peers = Peers(nodes)
    ranks = range(len(nodes))
    assert all(nodes[peers.of(rank) or 0] != nodes[rank] for rank in ranks)
    assert sorted(other for rank in ranks for other in peers.senders_to(rank)) == list(ranks)
    for node in set(nodes):
        loads = [len(peers.senders_to(rank)) for rank in peers.ranks_on(node)]
        assert max(loads) - min(loads) <= 1


def test_on_one_node_nobody_has_one() -> None:
    peers = Peers("aaa")
    assert [peers.of(rank) for rank in range(3)] == [None] * 3
    assert peers.senders_to(0) == []
