"""Where configs and the files they name are found: here, beside the config, or among what ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megahead.config.loading import config_from_dict, load_config
from megahead.config.plan import deepspeed_config
from megahead.config.training import EngineConfig
from megahead.errors import UserError
from support.commands import ROOT
from support.good_settings import GOOD

ZERO1 = json.loads((ROOT / "configs/deepspeed/zero1.json").read_text())


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def written(path: Path, deepspeed: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**GOOD, "engine": {"deepspeed": deepspeed}}))
    return path


def put(path: Path, stage: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))


def found_stage(config: Path) -> int:
    settings = load_config(config).engine.deepspeed
    assert isinstance(settings, dict)
    return int(settings["zero_optimization"]["stage"])


@pytest.mark.parametrize("name", ["demo-headless", "demo-headless.yaml", "configs/demo-headless.yaml"])
def test_a_shipped_config_is_found_by_its_name_in_any_folder(name: str) -> None:
    config = load_config(name, ["seed=3"])
    assert config == load_config(ROOT / "configs/demo-headless.yaml", ["seed=3"])
    assert config.engine.deepspeed == ZERO1


def test_a_file_goes_before_a_shipped_config_of_its_name() -> None:
    written(Path("configs/demo-headless.yaml"), "configs/deepspeed/zero1.json")
    assert load_config("configs/demo-headless.yaml").data.train == GOOD["data"]["train"]
    assert load_config("demo-headless") == load_config(ROOT / "configs/demo-headless.yaml")


def test_a_name_that_neither_is_there_nor_ships_is_told_what_does() -> None:
    with pytest.raises(
        UserError, match=r"is demo-headles instead \(No such file or directory\); did you mean `demo-headless`\?$"
    ):
        load_config("demo-headles")
    with pytest.raises(UserError, match=r"; megahead comes with .*demo-headless, .*, xlm-r-base-headless\.$"):
        load_config("qqq")
    with pytest.raises(UserError, match=r"is runs/x\.yaml instead \(No such file or directory\)\.$"):
        load_config("runs/x.yaml")


def test_a_deepspeed_file_is_looked_for_here_then_beside_the_config_then_among_what_ships(tmp_path: Path) -> None:
    config = written(tmp_path / "project/configs/mine.yaml", "configs/deepspeed/zero1.json")
    assert load_config(config).engine.deepspeed == ZERO1
    put(tmp_path / "project/configs/deepspeed/zero1.json", 2)
    assert found_stage(config) == 2
    put(Path("configs/deepspeed/zero1.json"), 3)
    assert found_stage(config) == 3


def test_a_deepspeed_file_may_lie_beside_its_config(tmp_path: Path) -> None:
    put(tmp_path / "project/mine.json", 2)
    assert found_stage(written(tmp_path / "project/mine.yaml", "mine.json")) == 2


def test_a_config_without_a_file_of_its_own_finds_what_ships() -> None:
    config = config_from_dict({**GOOD, "engine": {"deepspeed": "configs/deepspeed/zero1.json"}})
    assert deepspeed_config(config, 1)["zero_optimization"].items() >= ZERO1["zero_optimization"].items()


def test_settings_left_out_are_those_of_zero_0() -> None:
    assert EngineConfig().deepspeed == json.loads((ROOT / "configs/deepspeed/zero0.json").read_text())
    assert deepspeed_config(config_from_dict(GOOD), 1)["zero_optimization"]["stage"] == 0
