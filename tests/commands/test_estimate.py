"""What an estimate says of a run's phases."""

from __future__ import annotations

from math import inf

import pytest

from megahead.commands.estimate import PARTS, main, memory_table, parameter_lines, training_time
from megahead.commands.pretrain import describe
from megahead.config.loading import load_config
from megahead.config.plan import RunPlan, phases_of
from megahead.config.run import RunConfig
from megahead.errors import ConfigError, FieldError
from megahead.estimate import candidate_rows, run_flops
from megahead.report.tables import terminal

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
    _, *lines = parameter_lines(RunPlan.of(config, 1))
    told = [
        f"{flops / 1e9:.3g} GFLOP a token ({kind})" for flops, kind in zip(of_each_phase(config), kinds, strict=True)
    ]
    assert [line.split(":")[0] for line in lines] == told


def test_a_run_takes_as_long_as_its_phases() -> None:
    config = load_config(ENCODER, [])
    first, then = of_each_phase(config)
    assert first > then
    hours = (0.25 * first + 0.75 * then) * 2000 * config.tokens_per_step() / 1e11 / 3600
    assert training_time(RunPlan.of(config, 1), 1e11).endswith(f"{hours:,.3g} hours.")
    for speed in (0, -1, inf):
        with pytest.raises(ConfigError, match="--peak x --utilization` must be above 0 and finite"):
            training_time(RunPlan.of(config, 1), speed)


def test_the_table_of_memory_is_whole_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    plan = RunPlan.of(load_config("pythia-70m-headless", ["parallel.tensor=2"]), 64)
    terminal(width=80).print(memory_table(plan, 80))
    printed = capsys.readouterr().out
    assert all(f" {part} " in printed for part in [*PARTS, "total", "fits 80", *(f"ZeRO {k}" for k in range(4))])
    assert max(map(len, printed.splitlines())) < 80


def test_an_elastic_run_is_planned_on_the_ranks_that_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["parallel.elastic=true", "batch.global_size=4", "batch.micro_size=1"]
    assert "1 tensor x 2 data ranks" in describe(load_config("demo-headless", settings), 3)
    words = ["--config", "demo-headless", "--world-size", "3", *(f"--set={setting}" for setting in settings)]
    monkeypatch.setattr("sys.argv", ["estimate", *words, "--peak", "100", "--utilization", "0.5"])
    main()
    assert "tokens at 100 TFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "least"), [("--world-size", 1), ("--memory", 0)])
def test_what_no_machine_has_is_refused(option: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["estimate", "--config", "demo-headless", option, str(least - 1)])
    with pytest.raises(FieldError, match=f"`{option}` must be at least {least}, but is {least - 1}"):
        main()
