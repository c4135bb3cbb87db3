"""The step benchmark runs, and its ratio is that of the steps it timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_run import small_config, write_text

from steps.contender import Contender, compare
from steps.device import matrix_rate
from steps.tokens import token_rows


def test_both_objectives_take_real_steps_on_the_same_tokens(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path)
    rows = token_rows(config, None, count=4)
    assert [row.shape for row in rows] == [(2, 25)] * 4
    contenders = [Contender(config, name, torch.device("cpu"), "fp32", rows) for name in ("headless", "vanilla")]
    before = contenders[0].model.backbone.embedding.weight.clone()
    for index in range(4):
        for contender in contenders:
            contender.step(index)
    headless, vanilla = contenders
    for parts in zip(*headless.times.values(), strict=True):
        assert min(parts) > 0  # body, loss and optimizer
    assert len(headless.seconds()) == 3  # the first is a warm-up
    assert vanilla.candidates == [60] * 3
    assert max(headless.candidates) < 48
    assert not torch.equal(before, headless.model.backbone.embedding.weight)
    ratios = sorted(b / a for a, b in zip(headless.seconds(), vanilla.seconds(), strict=True))
    assert f"headless is {ratios[1]:.2f} times as fast as vanilla" in compare(headless, vanilla)


def test_presets_without_data_draw_by_zipfs_law(tmp_path: Path) -> None:
    config = small_config(tmp_path, {"data.train": ""})
    (rows,) = token_rows(config, None, count=1)
    assert rows.shape == (2, 25)
    assert 0 < rows.min() <= rows.max() < 60  # 0 would end a document


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_matrix_rate_is_positive(precision: str) -> None:
    assert matrix_rate(torch.device("cpu"), precision, size=64) > 0
