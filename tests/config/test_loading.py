"""What a user can write wrong in a config, and the sentences it earns; what is derived, and where."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from megahead.config.base import shipped_configs
from megahead.config.embedding import shards_embedding
from megahead.config.loading import config_from_dict, load_config
from megahead.config.model import NAMED_SIZES, ModelConfig
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.data.preprocess import end_token_id
from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import save_tokenizer, train_multilingual
from megahead.errors import ConfigError, ConfigErrors, UserError
from support.good_settings import GOOD


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
        "`optimizer.learning_rate` must be a number, but is 'x' instead.",
        "`training` must be given, but is missing.",
        "`traning` is not a setting; did you mean `training`?",
    ]


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


def test_a_shape_is_written_without_defaults_and_read_back() -> None:
    for size in NAMED_SIZES:
        model = ModelConfig(size=size, vocab_size=100, norm_eps=1e-4)
        written = model.non_default_settings()
        assert ModelConfig(**written) == model.model_copy(update={"size": None})
        assert {"family", "hidden_size", "vocab_size", "norm_eps"} <= {*written}
        assert not {"size", "init_std", "mlp_bias", "hidden_dropout"} & {*written}


def test_every_shipped_config_is_sound() -> None:
    root = Path(__file__).parents[2]
    for path in sorted((root / "configs").glob("*.yaml")):
        load_config(path)
        assert path.read_text().startswith("# "), f"{path} must open with its purpose"


@pytest.mark.parametrize("ranks", [1, 8, 32, 256])
@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_config_is_planned_on_any_number_of_ranks_or_says_what_keeps_its_recipe(
    name: str, ranks: int
) -> None:
    config = load_config(name)
    wanted = (config.batch.global_size, candidates_of(config))
    sentence = why_not(config, ranks)
    if sentence is not None:
        fewer = re.search(r"try (\d+) (data )?ranks?", sentence)
        ranks = int(fewer[1]) * (config.parallel.tensor if fewer[2] else 1) if fewer else ranks
        config = load_config(name, re.findall(r"(?:batch.micro_size|objective.group_samples)=\d+", sentence))
    assert why_not(config, ranks) is None
    assert (config.batch.global_size, candidates_of(config)) == wanted


SHARED_TOKENIZERS = {
    "bert-base-uncased-tokenizer.json": ("encoder-small-*", "modernbert-15m-*", "retromae-small-headless"),
    "bert-base-multilingual-cased-tokenizer.json": ("distilbert-multilingual-*", "multilingual-small-*"),
    "20B_tokenizer.json": ("pythia-*", "demo-*"),
    "gpt2_tokenizer.json": ("gpt2-*",),
}


def test_a_config_has_the_end_token_by_which_preprocessing_closes_documents(shared_data: Path, tmp_path: Path) -> None:
    """Else a run refuses the dataset that the guides make for it."""
    multilingual = tmp_path / "multilingual.json"
    save_tokenizer(train_multilingual(["a b c d"] * 9, 280), multilingual)
    tokenizers = {shared_data / "tokenizers" / name: configs for name, configs in SHARED_TOKENIZERS.items()}
    for path, patterns in {**tokenizers, multilingual: ("multilingual-million-*",)}.items():
        end = end_token_id(load_tokenizer(path), None)
        names = [name for name in shipped_configs() if any(fnmatch(name, pattern) for pattern in patterns)]
        assert names
        assert dict.fromkeys(names, end) == {name: load_config(name).data.end_token for name in names}


def why_not(config: RunConfig, ranks: int) -> str | None:
    try:
        RunPlan.of(config, ranks)
    except ConfigError as error:
        return str(error)
    return None


def candidates_of(config: RunConfig) -> int | str | None:
    """The rows whose targets compete, where their number does not depend on ranks."""
    rows = config.objective.group_samples
    if config.objective.name == "vanilla" or rows == "data_parallel":
        return None
    return config.batch.micro_size if rows == "micro_batch" else rows


def test_a_million_ids_lie_in_rows_and_are_planned() -> None:
    root = Path(__file__).parents[2]
    for name, ranks in (("multilingual-million-headless", 64), ("multilingual-million-small-headless", 1)):
        plan = RunPlan.of(load_config(root / f"configs/{name}.yaml"), ranks)
        assert plan.config.model.vocab_size == 1_000_000
        assert shards_embedding(plan.config)


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, megahead.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_blend_is_a_list_of_prefixes_and_weights() -> None:
    tree = changed(data={"train": [{"prefix": "a", "weight": 2}, {"prefix": "b", "weight": 0.5}]})
    assert [(part.prefix, part.weight) for part in config_from_dict(tree).data.parts()] == [("a", 2.0), ("b", 0.5)]
    assert config_from_dict(config_from_dict(tree).model_dump(mode="json")) == config_from_dict(tree)
    assert [part.prefix for part in config_from_dict(GOOD).data.parts()] == ["text"]


def test_sections_may_be_merged_and_dates_are_text(tmp_path: Path) -> None:
    """`<<` of YAML 1.1, also of a mapping that merges another, deeper down and later than it is used."""
    text = yaml.safe_dump({**GOOD, "name": "NAME", "schedule": "SCHEDULE"})
    text = text.replace("NAME", "2024-02-30")
    text = text.replace("SCHEDULE", "{<<: [&b {<<: &a {warmup_steps: 1, final_ratio: 0.5}, warmup_steps: 2}, *a]}")
    config = load_config(written(tmp_path, text))
    assert (config.name, config.schedule.warmup_steps, config.schedule.final_ratio) == ("2024-02-30", 2, 0.5)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("name: x", "line 2: key 'name' is given twice"),
        ("{a: 1, <<: {b: 1, b: 2}}: 1", "line 2: key 'b' is given twice"),
        ("seed: 0x_", "line 2: '0x_' cannot be read"),
        ("seed: !!int x", "line 2: 'x' cannot be read"),
        ("seed: !!timestamp x", "line 2: 'x' cannot be read"),
        ("seed: " + "9" * 5000, "line 2: '9999999999999999999999999999999999999999' cannot be read"),
    ],
)
def test_what_yaml_cannot_be_is_told_by_its_line(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(UserError, match=f"must be YAML, but is not in {says}"):
        load_config(written(tmp_path, f"name: y\n{line}\n"))


def numbers_of(settings: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in settings.model_fields.items():
        types = [field.annotation, *getattr(field.annotation, "__args__", ())]
        if {int, float}.intersection(type_ for type_ in types if isinstance(type_, type)) and bool not in types:
            yield f"{path}{name}"
        for section in types:
            if isinstance(section, type) and issubclass(section, BaseModel):
                yield from numbers_of(section, f"{path}{name}.")


def test_yaml_of_on_and_yes_is_no_number(tmp_path: Path) -> None:
    """It would be 1: one step, a checkpoint at each step, a learning rate of 1."""
    path, numbers = written(tmp_path, GOOD), list(numbers_of(RunConfig))
    assert {"seed", "training.steps", "training.keep_every", "objective.group_samples"} < {*numbers}
    for number in numbers:
        with pytest.raises(ConfigErrors) as caught:
            load_config(path, f"{number}=on")
        assert f"`{number}` must be a number, but is true instead." in caught.value.problems
    with pytest.raises(ConfigErrors, match=r"`optimizer\.betas` must be a number, but is true"):
        load_config(path, "optimizer.betas=[yes, 0.9]")
    assert load_config(path, "optimizer.gradient_clipping=off").optimizer.gradient_clipping == 0
    assert load_config(path, ["engine.compile=on", "engine.activation_checkpointing=yes"]).engine.compile is True
