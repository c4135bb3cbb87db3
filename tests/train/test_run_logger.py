"""What a run says while it trains: to a terminal, to a file, to Weights & Biases."""

from __future__ import annotations

import importlib.machinery
import io
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.engine.engine import Engine
from megahead.errors import ConfigError
from megahead.objectives.loader import StepBatches, StepLoader
from megahead.report.read import read_metrics
from megahead.train.boards import TRACKERS, open_boards
from megahead.train.run import pretrain
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(_: Group, config: RunConfig, terminal: bool) -> str:
    sys.stdout = Terminal() if terminal else io.StringIO()
    pretrain(config, Launch())
    return sys.stdout.getvalue()


def test_a_terminal_is_told_more_often_than_a_file_and_the_log_gets_all(tmp_path: Path) -> None:
    write_text(tmp_path)
    for name, terminal, lines in (("terminal", True, 6), ("file", False, 2)):
        every_step = {"training.log_seconds": 1e-9, "output_dir": str(tmp_path / name)}
        config = small_config(tmp_path, every_step)
        (output,) = on_ranks(1, patiently_said, config, terminal)
        told = [line for line in output.splitlines() if line.startswith("step ")]
        assert len(told) == lines, output
        assert len(read_metrics(tmp_path / name).training) == 6
        assert "ETA" in told[0]


def test_a_step_s_processor_time_is_logged_without_the_time_it_waited(tmp_path: Path) -> None:
    write_text(tmp_path)
    on_ranks(1, said_with_pauses, small_config(tmp_path))
    for record in read_metrics(tmp_path / "run").training:
        assert record["step_seconds"] > PAUSE / 2 + record["step_cpu_seconds"]  # other threads went on in the pause
        assert record["step_cpu_seconds"] > 0


PAUSE = 0.1


def said_with_pauses(group: Group, config: RunConfig) -> str:
    step = Engine.step

    def slow(engine: Engine, learning_rate: float) -> Any:
        time.sleep(PAUSE)
        return step(engine, learning_rate)

    Engine.step = slow  # type: ignore[method-assign, assignment]
    return said(group, config, terminal=False)


def patiently_said(group: Group, config: RunConfig, terminal: bool) -> str:
    """A file's timeout is made to outlast the run."""
    from megahead.train import log as logger

    logger._PRINT_INTERVAL_RATIO = 10**12
    return said(group, config, terminal)


def test_the_line_of_progress_has_what_was_held_out_and_skipped(tmp_path: Path) -> None:
    write_text(tmp_path)
    (output,) = on_ranks(1, said_with_a_bad_step, small_config(tmp_path, {"training.evaluate_every": 2}))
    last = [line for line in output.splitlines() if line.startswith("step 6/6")][-1]
    assert "tokens/s" in last
    assert "candidates" in last
    assert "held out " in last
    assert last.endswith("1 skipped  ETA 0s")


def said_with_a_bad_step(group: Group, config: RunConfig) -> str:
    step = StepLoader.step

    def bad_step(loader: StepLoader, first_sample: int) -> StepBatches:
        batches = step(loader, first_sample)
        if first_sample == config.batch.global_size:
            micro = batches.micro_batches[0]
            batches.micro_batches[0] = replace(micro, loss_weight=micro.loss_weight * math.inf)
        return batches

    StepLoader.step = bad_step  # type: ignore[method-assign]
    return said(group, config, terminal=True)


def logged(_: Group, config: RunConfig) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """What W&B is given, by a stand-in for it."""
    begun: dict[str, Any] = {}
    lines: list[dict[str, float]] = []
    wandb = ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    board = SimpleNamespace(
        log=lines.append, define_metric=lambda *_, **__: None, finish=lambda: begun.update(done=True)
    )
    wandb.init = lambda **options: begun.update(options) or board  # type: ignore[attr-defined]
    sys.modules["wandb"] = wandb
    pretrain(config, Launch())
    return begun, lines


def test_weights_and_biases_gets_the_curves_where_asked_for(tmp_path: Path) -> None:
    write_text(tmp_path)
    ((begun, lines),) = on_ranks(1, logged, small_config(tmp_path, {"training.wandb": "heads"}))
    assert (begun["project"], begun["name"], begun["resume"], begun["done"]) == ("heads", "small", "allow", True)
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert lines[-1].keys() >= {"validation/perplexity", "validation/loss"}


class Recorder(ModuleType):
    """Stands in for a tracker: keeps each call by its name."""

    def __init__(self, name: str, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: (
            self._calls.append((name, given, named)) or ([] if name == "search_runs" else self)
        )


def recorded(_: Group, config: RunConfig, name: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    sys.modules[name] = Recorder(name, calls)
    pretrain(config, Launch())
    return calls


@pytest.mark.parametrize(("name", "log", "end"), [("trackio", "log", "finish"), ("mlflow", "log_metrics", "end_run")])
def test_other_trackers_get_the_curves_where_asked_for(tmp_path: Path, name: str, log: str, end: str) -> None:
    write_text(tmp_path)
    (calls,) = on_ranks(1, recorded, small_config(tmp_path, {f"training.{name}": "heads"}), name)
    lines = [(given[0], named["step"]) for called, given, named in calls if called == log]
    assert [step for values, step in lines if "train/loss" in values] == [1, 2, 3, 4, 5, 6]
    assert lines[-1][0].keys() >= {"validation/perplexity", "validation/loss"}
    assert calls[-1][0] == end
    assert "heads" in str(calls[0])


def test_mlflow_gets_names_that_it_takes(tmp_path: Path) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    board = TRACKERS["mlflow"](Recorder("mlflow", calls), small_config(tmp_path, {"training.mlflow": "heads"}))
    board.add({"tasks/retrieval/mean_ndcg@10": 0.5, "train/a-b.c d:e_f": 2.0}, 3)
    assert calls[-1] == ("log_metrics", ({"tasks/retrieval/mean_ndcg_10": 0.5, "train/a-b.c d:e_f": 2.0},), {"step": 3})


def failing(_: Group, config: RunConfig, name: str, method: str) -> int:
    module, failed = Recorder(name, []), list[str]()

    def fail(*_given: Any, **_named: Any) -> None:
        failed.append(method)
        raise ConnectionError("no route to host")

    setattr(module, method, fail)
    sys.modules[name] = module
    pretrain(config, Launch())
    return len(failed)


@pytest.mark.parametrize(("name", "log"), [("trackio", "log"), ("mlflow", "log_metrics")])
def test_a_tracker_that_fails_costs_its_curves_and_not_the_run(
    tmp_path: Path, name: str, log: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {f"training.{name}": "heads"})
    assert on_ranks(1, failing, config, name, log) == [1]
    assert json.loads(config.folder().session_end.read_text())["ending"] == "finished"
    said = f"warning     {name} gets no more curves of this session (no route to host)"
    assert capfd.readouterr().out.count(said) == 1


def test_a_tracker_that_cannot_be_opened_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    module = Recorder("mlflow", [])
    monkeypatch.setattr(module, "set_experiment", lambda _: int("no server"), raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    with pytest.raises(
        ConfigError, match=r"^`training.mlflow` must be left out where mlflow cannot be opened, but is "
    ):
        open_boards(small_config(tmp_path, {"training.mlflow": "heads"}))


def test_weights_and_biases_that_is_not_installed_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megahead.train.boards.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        pretrain(small_config(tmp_path, {"training.wandb": "heads"}), Launch())
    assert str(caught.value) == (
        "`training.wandb` must be left out where wandb is not installed, but is given instead; "
        "pip install -e '.[wandb]'."
    )
