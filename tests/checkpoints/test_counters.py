"""What earlier versions did not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.checkpoints.reading import open_checkpoint, target_samples
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from support.saved import save_checkpoint


def counted(root: Path, state: dict[str, Any], config: dict[str, Any]) -> int:
    save_checkpoint(root, 6, [("a", torch.ones(2))], state=state, config=config, group=Group())
    return target_samples(open_checkpoint(root))


def test_samples_of_targets_are_those_of_all_steps_where_they_were_not_counted(tmp_path: Path) -> None:
    assert counted(tmp_path / "counted", {"target_samples": 40}, {"batch": {"global_size": 8}}) == 40
    assert counted(tmp_path / "absent", {}, {"batch": {"global_size": 8}}) == 48


@pytest.mark.parametrize("config", [{}, {"batch": 8}, {"batch": {"micro_size": 8}}, {"batch": {"global_size": "8"}}])
def test_without_a_batch_size_there_is_nothing_to_count_by(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="has no valid `target_samples`"):
        counted(tmp_path, {}, config)
