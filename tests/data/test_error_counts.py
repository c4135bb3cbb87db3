"""Counts of misses: settled a period later, halved with each, the same on any ranks, restored as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megahead.config.masking import MaskingConfig
from megahead.data.batch import EncoderRowBuilder
from megahead.data.masking import MaskingCollator
from megahead.data.strategies import WEIGHT_FLOOR, Hardest
from megahead.data.strategy import TargetErrorCounts
from megahead.distributed.group import Group
from megahead.errors import ConfigError
from support.on_ranks import on_ranks

V, EVERY, SAMPLES = 30, 3, 8
HALF = SAMPLES // 2


def noted(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets of a step's samples, a few each, and which were missed."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(V, (2 * SAMPLES,), generator=generator), torch.rand(2 * SAMPLES, generator=generator) < 0.5


def follow(group: Group, steps: int, begun: int = 0, state: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What rows are masked by at each step, and the state at the end."""
    target_error_counts = TargetErrorCounts(V, EVERY, SAMPLES)
    if state is not None:
        target_error_counts.restore(state, begun * SAMPLES, group)
    seen = []
    for step in range(begun, steps):
        seen.append(target_error_counts.at(step))
        ids, missed = (part.view(group.size, -1)[group.rank] for part in noted(step))
        target_error_counts.record(ids, missed)
        target_error_counts.end_step((step + 1) * SAMPLES, step != 4, group)  # the fifth step was not applied
    return [*seen, target_error_counts.state(group)]


def counts(steps: list[int]) -> torch.Tensor:
    total = torch.zeros(V, 2, dtype=torch.int64)
    for step in steps:
        for id_, missed in zip(*(part.tolist() for part in noted(step)), strict=True):
            total[id_] += torch.tensor([missed, 1])
    return total


def test_a_period_is_masked_by_what_was_counted_before_the_one_before() -> None:
    *seen, _ = follow(Group(), 13)
    first = counts([0, 1, 2])
    second = first // 2 + counts([3, 5])
    for step in range(13):
        expected = {0: 0, 1: 0, 2: first, 3: second, 4: second // 2 + counts([6, 7, 8])}[step // EVERY]
        assert (seen[step] == expected).all(), step


def test_only_at_the_end_of_a_period_counts_come_to_the_host() -> None:
    """`meta` tensors have no numbers that could be copied."""
    target_error_counts = TargetErrorCounts(V, EVERY, SAMPLES)
    for step in range(EVERY - 1):
        target_error_counts.record(torch.zeros(5, dtype=torch.int64, device="meta"), torch.ones(5, device="meta"))
        target_error_counts.end_step((step + 1) * SAMPLES, True, Group())
    with pytest.raises(NotImplementedError, match="no data"):
        target_error_counts.end_step(EVERY * SAMPLES, True, Group())


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_count_together(ranks: int) -> None:
    alone = follow(Group(), 11)
    for mine in on_ranks(ranks, follow, 11):
        for one, other in zip(mine, alone, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("begun", [1, 3, 5, 6, 8])
def test_what_is_restored_goes_on_on_other_ranks(begun: int) -> None:
    whole = follow(Group(), 12)
    state = follow(Group(), begun)[-1]
    for mine in on_ranks(2, follow, 12, begun, state):
        for one, other in zip(mine, whole[begun:], strict=True):
            assert torch.equal(one, other)


def test_ids_are_selected_by_their_share_of_misses() -> None:
    target_error_counts = TargetErrorCounts(V, EVERY, SAMPLES)
    hard = torch.arange(V) >= 15
    for step in range(EVERY):  # the hard half was always missed, the other one never
        ids = torch.arange(V).repeat(1000)
        target_error_counts.record(ids, hard.repeat(1000))
        target_error_counts.end_step((step + 1) * SAMPLES, True, Group())
    config = MaskingConfig(mask_token=3, cls_token=1, sep_token=2, rate=0.02)
    collator = MaskingCollator(
        EncoderRowBuilder(config, 2, False),
        Hardest(np.ones(V), target_error_counts),
        V,
        5,
        samples_per_step=SAMPLES,
        steps=10**6,
    )
    text = np.random.default_rng(0).integers(4, V, (4000, 126))

    def ratio(first_step: int) -> float:
        batch = collator.batch(text, first_step * SAMPLES + np.arange(len(text)))
        chosen = np.bincount(batch.target_ids_N.numpy(), minlength=V)
        return float(chosen[15:].sum() / 15 / (chosen[4:15].sum() / 11))

    assert ratio(EVERY) == pytest.approx(1, abs=0.1)
    assert ratio(2 * EVERY) == pytest.approx((1 + WEIGHT_FLOOR) / WEIGHT_FLOOR, rel=0.15)


def test_steps_of_another_size_must_begin_where_those_that_were_counted_ended() -> None:
    state = follow(Group(), 5)[-1]
    TargetErrorCounts(V, EVERY, SAMPLES // 2).restore(state, 5 * SAMPLES, Group())
    with pytest.raises(ConfigError, match=r"`batch\.global_size` must divide the 40 samples"):
        TargetErrorCounts(V, EVERY, 12).restore(state, 5 * SAMPLES, Group())
