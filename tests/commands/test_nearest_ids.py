"""`megahead nearest-ids`, and runs that use its file: the same on two ranks, resumed with the same file alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megahead.config.run import RunConfig
from megahead.data.loader import find_nearest_ids
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import CheckpointError, ConfigError
from megahead.hf.trained import TrainedModel
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.forked import run_script
from support.on_ranks import on_ranks
from support.small_checkpoint import save_small, save_tokenizer
from support.small_checkpoint import small_config as untrained
from support.small_run import same_tensors, small_config, write_text


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


def nearest(folder: Path, seed: int = 0) -> str:
    np.save(folder / f"{seed}.npy", find_nearest_ids(np.random.default_rng(seed).standard_normal((60, 8)), 3))
    return str(folder / f"{seed}.npy")


def test_hard_negatives_are_the_same_on_two_ranks_and_after_a_resume_from_the_same_file(tmp_path: Path) -> None:
    write_text(tmp_path)
    objective = {"bias": "corrected", "nearest": 2, "group_samples": 4}
    changes = {"objective": objective, "data.nearest_ids": nearest(tmp_path)}
    on_ranks(1, run, small_config(tmp_path, changes | {"output_dir": str(tmp_path / "whole")}))
    on_ranks(2, run, small_config(tmp_path, changes | {"output_dir": str(tmp_path / "two")}))
    third = str(tmp_path / "whole/checkpoints/step-00000003")
    on_ranks(1, run, small_config(tmp_path, changes), third)
    assert same_tensors(tmp_path / "run", tmp_path / "whole")
    one, two = (read_metrics(tmp_path / name) for name in ("whole", "two"))
    assert [r["loss"] for r in two.training] == pytest.approx([r["loss"] for r in one.training], abs=1e-5)
    assert one.training[0]["candidates"] > 30  # of 60 ids, of which groups of 96 targets have some 30
    other = small_config(tmp_path, changes | {"data.nearest_ids": nearest(tmp_path, 1)})
    with pytest.raises(CheckpointError, match=r"differs in data\.nearest_ids"):
        pretrain(other, resume=third)
    wider = {"objective": objective | {"nearest": 4}}
    with pytest.raises(ConfigError, match=r"`objective\.nearest` must be at most the number of .* \(3\), but is 4"):
        pretrain(small_config(tmp_path, changes | wider))
    with pytest.raises(ConfigError, match=r"data\.nearest_ids` must name a file"):
        pretrain(small_config(tmp_path, changes | {"data.nearest_ids": "nowhere.npy"}))


def test_a_run_that_ends_vanilla_goes_on_without_the_file_and_resumes_in_each_phase(tmp_path: Path) -> None:
    write_text(tmp_path)
    objective = {"bias": "corrected", "nearest": 2, "schedule": {"vanilla_share": 0.5}}
    changes = {"objective": objective, "data.nearest_ids": nearest(tmp_path), "training.checkpoint_every": 1}
    steps = {"training.steps": 4, "training.evaluate_every": 100}
    on_ranks(1, run, small_config(tmp_path, changes | steps | {"output_dir": str(tmp_path / "whole")}))
    for step in (1, 2, 3):
        elsewhere = {"output_dir": str(tmp_path / f"{step}")}
        checkpoint = str(tmp_path / f"whole/checkpoints/step-{step:08d}")
        assert on_ranks(1, run, small_config(tmp_path, changes | steps | elsewhere), checkpoint) == ["finished"]
        assert same_tensors(tmp_path / f"{step}", tmp_path / "whole")
    assert TrainedModel.open(tmp_path / "whole").config.data.nearest_ids is None


def test_the_command_writes_the_nearest_rows_of_a_run(tmp_path: Path) -> None:
    save_small(tmp_path / "run", untrained())
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    done = run_script(
        "tools/nearest_ids.py", "--model", str(tmp_path / "run"), "--each", "4", "--output", str(tmp_path / "ids.npy")
    )
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "ids.npy").shape[1] == 4
