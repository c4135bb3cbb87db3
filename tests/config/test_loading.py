"""What a user can write wrong in a config, and the sentences it earns; what is derived, and where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from megahead.config import RunConfig, config_from_dict, load_config
from megahead.errors import ConfigError, ConfigErrors, UserError

GOOD: dict[str, Any] = {
    "name": "good",
    "model": {"size": "pythia-14m", "vocab_size": 50277},
    "data": {"train": "text", "sequence_length": 128},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"steps": 100},
}


def written(folder: Path, tree: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**GOOD, **{name: {**GOOD.get(name, {}), **values} for name, values in sections.items()}}


def problems(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        config_from_dict(tree)
    return caught.value.problems


def test_overrides_reach_into_sections_and_make_them(tmp_path: Path) -> None:
    overrides = [
        "optimizer.learning_rate=3e-4",
        "model.num_layers=2",
        "init.from_checkpoint=runs/x",
        "init.mode=continue",
    ]
    config = load_config(written(tmp_path, GOOD), overrides)
    assert config.optimizer.learning_rate == 3e-4
    assert (config.model.num_layers, config.model.hidden_size) == (2, 128)
    assert config.init is not None
    assert config.init.from_checkpoint == "runs/x"


def test_numbers_like_1e_3_are_numbers(tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD).replace("learning_rate: 0.001", "learning_rate: 1e-3")
    assert "1e-3" in text
    assert load_config(written(tmp_path, text)).optimizer.learning_rate == 1e-3


def test_all_mistakes_are_told_at_once_each_in_a_sentence() -> None:
    tree = changed(model={"hiden_size": 3}, batch={"micro_size": -1}, optimizer={"learning_rate": "x"})
    tree["traning"] = tree.pop("training")
    assert problems(tree) == [
        "`model.hiden_size` is not a setting; did you mean `model.hidden_size`?",
        "`batch.micro_size` must be greater than 0, but is -1 instead.",
        "`optimizer.learning_rate` must be a valid number, unable to parse string as a number, but is 'x' instead.",
        "`training` must be given, but is missing.",
        "`traning` is not a setting; did you mean `training`?",
    ]


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"model": {"size": {"a": 1}}}, "`model.size` must be one of pythia-14m"),
        ({"model": {"size": "pythia-15m"}}, "`model.size` must be one of pythia-14m"),
        ({"model": {"num_heads": 3}}, "`model.hidden_size` must be a multiple of num_heads (3), but is 128 instead."),
        ({"model": {"rotary_pct": 0.1}}, "`model.rotary_pct` must rotate an even number"),
        ({"data": {"sequence_length": 4096}}, "`data.sequence_length` must be at most model.max_positions (2048)"),
        ({"data": {"end_token": 60000}}, "`data.end_token` must be below model.vocab_size (50277)"),
        ({"schedule": {"name": "wsd"}}, "`schedule.decay_steps` must be given for the wsd schedule"),
        ({"schedule": {"decay_steps": 3}}, "`schedule.decay_steps` must be left out for the cosine schedule"),
        ({"schedule": {"warmup_steps": 101}}, "`schedule.warmup_steps` must leave its warm-up and decay within"),
        ({"init": {"from_checkpoint": "x", "mode": "probe"}}, "`init.mode` must be `continue` unless"),
        ({"objective": {"temperature": 0}}, "`objective.temperature` must be greater than 0, but is 0 instead."),
        (
            {"engine": {"precision": "fp8"}},
            "`engine.precision` must be 'fp32', 'bf16' or 'fp16', but is 'fp8' instead.",
        ),
    ],
)
def test_rules_between_settings(sections: dict[str, dict[str, Any]], sentence: str) -> None:
    (problem,) = problems(changed(**sections))
    assert problem.startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1", "must be YAML, but is not"),
        ("- 1\n- 2\n", "must hold settings as `key: value`, but holds list instead."),
        ("name: a\nname: b\n", "key 'name' is given twice"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=r"run\.yaml") as caught:
        load_config(written(tmp_path, text))
    assert sentence in str(caught.value)


def test_a_missing_file_and_a_broken_override(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`--config` must name a readable YAML file, but is .*none.yaml"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"`--set` must look like section.field=value"):
        load_config(written(tmp_path, GOOD), ["training.steps"])


def test_a_config_survives_json() -> None:
    config = config_from_dict(changed(schedule={"name": "wsd", "decay_steps": 5}))
    assert config_from_dict(config.model_dump(mode="json")) == config


def test_every_setting_is_described_and_frozen() -> None:
    seen: list[str] = []

    def visit(settings: type[BaseModel], path: str) -> None:
        assert settings.model_config["frozen"]
        assert settings.model_config["extra"] == "forbid"
        for name, field in settings.model_fields.items():
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
            for section in sections:
                visit(section, f"{path}{name}.")
            assert sections or field.description, f"{path}{name} has no description"
            seen.append(name)

    visit(RunConfig, "")
    assert len(seen) > 40


def test_every_shipped_config_is_sound() -> None:
    root = Path(__file__).parents[2]
    for path in sorted((root / "configs").glob("*.yaml")):
        load_config(path)
        assert path.read_text().startswith("# "), f"{path} must open with its purpose"


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, megahead.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_blend_is_a_list_of_prefixes_and_weights() -> None:
    tree = changed(data={"train": [{"prefix": "a", "weight": 2}, {"prefix": "b", "weight": 0.5}]})
    assert [(part.prefix, part.weight) for part in config_from_dict(tree).data.parts()] == [("a", 2.0), ("b", 0.5)]
    assert config_from_dict(config_from_dict(tree).model_dump(mode="json")) == config_from_dict(tree)
    assert [part.prefix for part in config_from_dict(GOOD).data.parts()] == ["text"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"train": []}, "`data.train` must name at least one dataset, but is an empty list instead."),
        ({"train": [{"prefix": "a", "weight": 0}]}, "`data.train.0.weight` must be greater than 0, but is 0 instead."),
        ({"train": [{"prefix": "a", "weight": 1}, {"prefix": "b"}]}, "give every dataset a weight, or none"),
        ({"train": [{"weight": 1}]}, "`data.train.0.prefix` must be given, but is missing"),
        ({"train": [{"prefix": "a", "share": 1}]}, "`data.train.0.share` is not a setting"),
        ({"train": 7}, "`data.train` must be a valid string, but is 7 instead."),
        ({"order": "stored", "pack": "best_fit"}, "`data.pack` must be `stream` with order: stored"),
        ({"documents_a_row": 4}, "`data.documents_a_row` must be left out unless pack is `best_fit`"),
    ],
)
def test_mistakes_in_what_is_read(data: dict[str, Any], says: str) -> None:
    (problem,) = problems(changed(data=data))
    assert says in problem
