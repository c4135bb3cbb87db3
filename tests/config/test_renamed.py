"""Settings keep their earlier names: they are read, and a line names the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megahead.config.loading import config_from_checkpoint, config_from_dict, load_config
from support.small_run import small_config

OLD = "training.mirror is called training.remote_checkpoints now\n"


def test_an_earlier_name_is_read_and_answered_with_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = small_config(tmp_path).model_dump(mode="json")
    tree["training"] |= {"mirror": "s3://bucket/run", "copy_every": 1}
    for new in ("remote_checkpoints", "replicate_every"):
        del tree["training"][new]
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(tree))
    training = load_config(path).training
    assert (training.remote_checkpoints, training.replicate_every) == ("s3://bucket/run", 1)
    assert sorted(capsys.readouterr().err.splitlines(keepends=True)) == [
        "training.copy_every is called training.replicate_every now\n",
        OLD,
    ]
    assert load_config(path, "training.mirror=s3://bucket/other").training.remote_checkpoints == "s3://bucket/other"
    assert load_config(path, "training.remote_checkpoints=null").training.remote_checkpoints is None
    capsys.readouterr()
    monkeypatch.setenv("RANK", "1")
    assert load_config(path).training.replicate_every == 1
    monkeypatch.delenv("RANK")
    assert config_from_checkpoint(tree, "a checkpoint").training.remote_checkpoints == "s3://bucket/run"
    assert capsys.readouterr().err == ""


def test_a_setting_may_change_by_its_earlier_name(tmp_path: Path) -> None:
    tree = small_config(tmp_path).model_dump(mode="json")
    tree["resume"] = {"allow": ["training.mirror", "training.copy_every", "schedule"]}
    allowed = ("training.remote_checkpoints", "training.replicate_every", "schedule")
    assert config_from_dict(tree).resume.allow == allowed
    assert config_from_checkpoint(tree, "a checkpoint").resume.allow == allowed
