"""What an estimate says of a run's phases."""

from __future__ import annotations

import pytest

from megahead.commands.estimate import parameter_lines, time_taken
from megahead.config.loading import load_config
from megahead.config.plan import phases_of
from megahead.config.run import RunConfig
from megahead.estimate import candidate_rows, run_flops

ENCODER = "configs/modernbert-15m-causal-first.yaml"


def of_each_phase(config: RunConfig) -> list[float]:
    """Operations a token."""
    return [run_flops(phase.config, candidate_rows(phase.config)).total for phase in phases_of(config)]


@pytest.mark.parametrize(
    ("name", "settings", "kinds"),
    [
        (ENCODER, [], ["headless on next tokens", "headless on masked tokens"]),
        ("demo-headless", ["objective.schedule.vanilla_share=0.5"], ["headless", "vanilla (untied, with a bias)"]),
        ("demo-headless", [], ["headless"]),
    ],
)
def test_each_phase_is_named_and_counted(name: str, settings: list[str], kinds: list[str]) -> None:
    config = load_config(name, settings)
    _, *lines = parameter_lines(config)
    told = [
        f"{flops / 1e9:.3g} GFLOP a token ({kind})" for flops, kind in zip(of_each_phase(config), kinds, strict=True)
    ]
    assert [line.split(":")[0] for line in lines] == told


def test_a_run_takes_as_long_as_its_phases() -> None:
    config = load_config(ENCODER, [])
    first, then = of_each_phase(config)
    assert first > then
    hours = (0.25 * first + 0.75 * then) * 2000 * config.tokens_per_step() / 1e11 / 3600
    assert time_taken(config, 1e11).endswith(f"{hours:,.3g} hours.")
