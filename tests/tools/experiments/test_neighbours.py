"""The method's neighbours, in tiny."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from experiments.neighbours import compare_neighbours
from experiments.runner import GRIDS, ExperimentRunner
from megahead.report.read import read_runs
from support.long import long
from support.runner import TINY, results


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        long("decoder", "meap-30"),
        long("encoder", "frequency"),
        ("encoder", "causal-50"),
        long("encoder", "dropping"),
        long("four-layers", "rate-40-late-of-4"),
        long("four-layers", "dropping-of-4"),
        long("diffusion", "diffusion-vanilla"),
        long("detection", "electra-vanilla"),
        ("small", "softmax-10"),
        long("small-encoder", "untied"),
    ],
)
def test_neighbours_are_held_against_the_plain_objective_at_equal_tokens_and_time(
    runner: ExperimentRunner, monkeypatch: pytest.MonkeyPatch, kind: str, variant: str
) -> None:
    grid = GRIDS["neighbours"][kind]
    small = {name: value for name, value in {"vocabulary": 320, "seeds": [0]}.items() if name in grid}
    monkeypatch.setitem(GRIDS, "neighbours", {kind: grid | {"steps": 4} | small})
    sizes = {"VOCABULARY": 320, "SEEDS": (0,), "WARMUP": 1, "COST_STEPS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(f"experiments.neighbours.{name}", value)
    costs = {"plain": 3.0, variant: 2.0}
    name_of = re.compile(rf"{kind}-(.*)-beside-.*")
    monkeypatch.setattr("experiments.runner._cost", lambda run, _: costs[name_of.fullmatch(run.name)[1]])  # type: ignore[index]
    settings = [part for part in TINY if "training.steps" not in part]
    layers = 4 if kind == "four-layers" else 2
    shape = [f"model.num_layers={layers}", "model.num_heads=2", "batch.micro_size=8", "training.evaluate_every=2"]
    compare_neighbours(replace(runner, settings=[*settings, *shape]), [variant])
    rows = results(runner, "neighbours")
    expected = [("plain", "tokens", 4), (variant, "tokens", 4), (variant, "time", 6)]  # 6 in the plain one's time
    if "at_equal" in grid:
        del expected[1]
    assert [(row["model"], row["variant"], row["at equal"], row["tokens"]) for row in rows] == [
        (kind, name, equal, steps * 256) for name, equal, steps in expected
    ]
    assert [row["cost"] for row in rows] == [1, *[2 / 3] * (len(expected) - 1)]
    last_run = f"{kind}-{variant}-0" + ("-time" if "at_equal" in grid else "")
    config = read_runs([runner.folder / last_run])[0].config
    asked = {
        "meap-30": ("masked_inputs", "mask_token", 320),
        "frequency": ("masking", "strategy", "frequency"),
        "causal-50": ("objective", "schedule", {"causal_share": 0.5, "vanilla_share": None}),
        "dropping": ("masking", "dropping", {"from_layer": 0, "to_layer": None, "keep_share": 0.5, "by": "hardest"}),
        "dropping-of-4": (
            "masking",
            "dropping",
            {"from_layer": 1, "to_layer": None, "keep_share": 0.5, "by": "hardest"},
        ),
        "rate-40-late-of-4": ("masking", "masks_from_layer", 2),
        "diffusion-vanilla": ("objective", "name", "vanilla"),
        "electra-vanilla": ("objective", "name", "vanilla"),
        "softmax-10": ("objective", "vanilla_weight", 0.1),
        "untied": ("objective", "candidates", "own"),
    }
    section, setting, value = asked[variant]
    assert config[section][setting] == value
