"""`pretrain` called by a script or a notebook: what it returns, and that the process is left as it was."""

from __future__ import annotations

import gc
import math
import signal
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.report.read import read_metrics
from megahead.train import run as setup
from megahead.train.run import ONE_PROCESS, Run, pretrain
from support.forked import forked
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text

STAGES = (0, 3, 1, 3, 2, 0)


def run_at(folder: Path, number: int, k: int = 0, **changes: Any) -> Run:
    """The small run at a ZeRO stage, in a folder of its own."""
    return pretrain(small_config(folder, {**stage(number), "output_dir": str(folder / f"run-{k}"), **changes}))


def test_a_run_says_where_it_is_and_how_it_ended(tmp_path: Path) -> None:
    write_text(tmp_path)
    run = forked(run_at, tmp_path, 0)
    assert (run.folder.path, run.step, run.ending) == (tmp_path / "run-0", 6, "finished")
    assert run.held_out_perplexity == pytest.approx(read_metrics(run.folder.metrics).validation[-1]["perplexity"])
    assert forked(run_at, tmp_path, 0) == run  # nothing is left to do
    without = forked(unvalidated, tmp_path)
    assert without.held_out_perplexity is None


def unvalidated(folder: Path) -> Run:
    return run_at(folder, 0, 1, **{"data.validation": None})


@pytest.mark.parametrize("given", ["demo-headless", {"training": {}}, None], ids=str)
def test_a_config_that_is_none_is_refused_in_a_sentence(given: Any) -> None:
    with pytest.raises(ValueError, match=r"`config` must be a RunConfig, but is a .* load_config makes one of a YAML"):
        pretrain(given)


def test_runs_follow_each_other_in_one_process_at_every_stage(tmp_path: Path) -> None:
    write_text(tmp_path)
    forked(several, tmp_path)
    assert same_tensors(tmp_path / "run-0", tmp_path / "run-5")
    assert same_tensors(tmp_path / "run-1", tmp_path / "run-3")


def several(folder: Path) -> None:
    """Each ends without a process group and without its model."""
    models = []
    original = setup.build_engine

    def noted(*args: Any) -> Any:
        engine, ways = original(*args)
        models.append(weakref.ref(engine.module))
        return engine, ways

    setup.build_engine = noted
    for k, number in enumerate(STAGES):
        assert run_at(folder, number, k).ending == "finished"
        assert not dist.is_initialized()
        gc.collect()
        assert models.pop()() is None, f"the model of ZeRO {number} is still there"


def test_after_a_run_that_failed_the_next_one_works(tmp_path: Path) -> None:
    write_text(tmp_path)
    forked(failing_then_working, tmp_path)


def failing_then_working(folder: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    worse = {"optimizer.learning_rate": 1e30, "faults.bad_step": "stop", "optimizer.gradient_clipping": 0}
    with pytest.raises(UserError, match="steps must be finite"):
        run_at(folder, 1, 0, **worse)
    assert not dist.is_initialized()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == handlers
    assert run_at(folder, 1, 1).ending == "finished"


def test_signals_and_deterministic_algorithms_are_put_back(tmp_path: Path) -> None:
    write_text(tmp_path)
    forked(as_before, tmp_path)


def as_before(folder: Path) -> None:
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: heard.append(number))
    torch.use_deterministic_algorithms(True, warn_only=True)
    run_at(folder, 0, 0, **{"engine.deterministic": True})
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGTERM, signal.SIGINT]


def test_a_process_group_that_was_there_is_used_and_stays(tmp_path: Path) -> None:
    write_text(tmp_path)
    forked(within_a_group, tmp_path)


def within_a_group(folder: Path) -> None:
    for k in range(2):  # another group the second time
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        run_at(folder, 1, k)
        assert math.isclose(float(sum_over_ranks()), 1)
        dist.destroy_process_group()


def test_ranks_of_a_process_group_train_on_their_current_devices(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, {"engine.device": "auto"})
    assert on_ranks(2, device_chosen, config) == [0, 1]
    assert on_ranks(1, device_chosen, config, Launch(local_rank=3)) == [3], "the launch's, where one is given"


def device_chosen(group: Group, config: RunConfig, launch: Launch = ONE_PROCESS) -> int:
    chosen: list[int] = []

    def choose_device(_: str, local_rank: int) -> torch.device:
        chosen.append(local_rank)
        return torch.device("cpu")

    cuda = patch.multiple(torch.cuda, is_available=lambda: True, current_device=lambda: group.rank)
    with cuda, patch.object(setup, "choose_device", choose_device), suppress(UserError):
        pretrain(config, launch, resume="nowhere")
    return chosen[0]


def sum_over_ranks() -> torch.Tensor:
    one = torch.ones(())
    dist.all_reduce(one)
    return one


def test_another_thread_may_train(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert forked(in_a_thread, tmp_path) == "finished"


def in_a_thread(folder: Path) -> str:
    endings: list[str] = []
    thread = threading.Thread(target=lambda: endings.append(run_at(folder, 0).ending))
    thread.start()
    thread.join()
    return endings[0]
