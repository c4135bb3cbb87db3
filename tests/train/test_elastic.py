"""Elastic runs: how many ranks train, what the others do, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megahead.checkpoints.disk import step_folders
from megahead.config.plan import RunPlan
from megahead.distributed.launch import Launch, read_launch
from megahead.errors import ConfigError, UserError
from megahead.train.log import describe_mesh, previous_mesh
from megahead.train.run import describe_elastic, elastic_launch, pretrain, shared_settings
from megahead.train.saving import Lease, new_session_id
from support.commands import free_port
from support.forked import forked
from support.killable import codes, said, start_ranks
from support.named import without_digits
from support.small_run import same_tensors, small_config, write_text

ELASTIC = {"parallel.elastic": True}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_MAX_RESTARTS": "5",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}


@pytest.mark.parametrize(
    ("there", "changes", "used"),
    [
        (1, {}, 1),
        (3, {}, 2),  # four micro-batches a step
        (4, {}, 4),
        (9, {}, 4),
        (7, {"batch.global_size": 12}, 6),
        (5, {"batch.global_size": 14}, 1),
        (7, {"parallel.tensor": 2}, 4),
        (3, {"parallel.tensor": 2}, 2),
    ],
)
def test_as_many_ranks_train_as_the_batch_can_be_split_over(
    tmp_path: Path, there: int, changes: dict[str, Any], used: int
) -> None:
    config = small_config(tmp_path, ELASTIC | changes)
    assert config.usable_ranks(there) == used
    plan = RunPlan.of(config, used)
    assert plan.data_ranks * plan.accumulation_steps * config.batch.micro_size == config.batch.global_size


def test_without_elastic_all_ranks_train_or_none(tmp_path: Path) -> None:
    assert small_config(tmp_path).usable_ranks(3) == 3


def test_torchrun_says_whether_it_starts_ranks_again(tmp_path: Path) -> None:
    launch = read_launch(TORCHRUN)
    assert launch == Launch(1, 3, 0, "node0", 1234, ranks_per_node=1, restarts_ranks=True, has_launcher=True)
    used = elastic_launch(small_config(tmp_path, ELASTIC), launch)
    assert (used.world_size, used.spare_ranks) == (2, 1)
    plan = RunPlan.of(small_config(tmp_path, ELASTIC), 2)
    assert describe_elastic(plan, used) == [("elastic", "2 of 3 ranks train")]


def test_nodes_need_not_have_been_restarted_equally_often_to_meet() -> None:
    """Each agent counts for itself."""
    others = read_launch(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert others.attempt == read_launch(TORCHRUN).attempt
    assert read_launch(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).attempt == 2  # on one node they are


def test_under_other_launchers_a_line_says_that_nothing_starts_lost_ranks_again(tmp_path: Path) -> None:
    config = small_config(tmp_path, ELASTIC)
    slurm = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "n",
        "MASTER_PORT": "1",
    }
    for launch in (read_launch({}), read_launch(slurm)):
        used = elastic_launch(config, launch)
        ((name, line),) = describe_elastic(RunPlan.of(config, used.world_size), used)
        assert name == "elastic"
        assert "nothing restarts lost ranks; launch/elastic.sh would" in line


@pytest.mark.parametrize("world", ["1", "3"])
def test_a_store_that_torchrun_keeps_is_refused(tmp_path: Path, world: str) -> None:
    launch = read_launch(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": world, "RANK": "0"})
    with pytest.raises(UserError, match=r"`parallel.elastic` needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        elastic_launch(small_config(tmp_path, ELASTIC), launch)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"batch.global_size": 7},
            "`batch.global_size` must be a multiple of batch.micro_size (2) under parallel.elastic, but is 7 instead; "
            "no number of ranks can serve it.",
        ),
        (
            {"objective.group_samples": "data_parallel"},
            "`objective.group_samples` must not depend on the number of ranks under parallel.elastic, but is "
            "data_parallel instead; write a number of samples.",
        ),
    ],
)
def test_a_batch_that_no_or_only_some_ranks_serve_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        small_config(tmp_path, ELASTIC | changes)
    assert sentence in str(caught.value)
    small_config(tmp_path, changes)


def test_a_tensor_group_stays_within_a_node_and_needs_its_ranks(tmp_path: Path) -> None:
    config = small_config(tmp_path, ELASTIC | {"parallel.tensor": 2})
    with pytest.raises(ConfigError, match=r"must divide the ranks of a node \(1\) under parallel.elastic, but is 2"):
        elastic_launch(config, read_launch(TORCHRUN))
    with pytest.raises(ConfigError, match=r"must be at most the number of ranks \(1\), but is 2"):
        elastic_launch(config, Launch())


def test_a_rank_that_waits_ends_with_the_others_and_may_be_lost(tmp_path: Path) -> None:
    write_text(tmp_path)
    config = small_config(tmp_path, ELASTIC)

    def wait_for_rank_2(rank: int) -> None:
        """The training of a second may be over before a rank that waits for a processor has come."""
        while rank == 0 and "waits" not in said(tmp_path, 2):
            time.sleep(0.01)

    (tmp_path / "rank-2.log").touch()
    ranks = start_ranks(config, 3, tmp_path, sabotage=wait_for_rank_2)
    assert codes(ranks) == [0, 0, 0], "".join(said(tmp_path, rank) for rank in range(3))
    assert said(tmp_path, 2) == ("rank 2 waits: 8 rows a step in micro-batches of 2 can be split over 2 of 3 ranks\n")
    assert "2 of 3 ranks train" in said(tmp_path, 0)
    again = small_config(tmp_path, ELASTIC | {"output_dir": str(tmp_path / "again")})

    def lost(rank: int) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    assert codes(start_ranks(again, 3, tmp_path, sabotage=lost)) == [0, 0, -signal.SIGKILL]
    assert same_tensors(tmp_path / "run", tmp_path / "again")


def test_a_rank_that_comes_after_the_end_does_not_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But it does where the last steps must be taken again."""
    write_text(tmp_path)
    config = small_config(tmp_path, ELASTIC | {"engine.timeout_seconds": 1})
    late = Launch(2, 3, 2, "127.0.0.1", int(free_port()))
    forked(pretrain, config)
    result = pretrain(config, late)
    assert (result.step, result.ending) == (6, "finished")
    assert f"rank 2 need not wait: the run in {tmp_path / 'run'} has finished\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="rank 2 could not find rank 0 there"):
        pretrain(config, late, str(tmp_path / "run"))
    newest, *_ = step_folders(tmp_path / "run")
    (tmp_path / "run/ending.json").write_text("[]")
    with pytest.raises(UserError, match="rank 2 could not find rank 0 there"):
        pretrain(config, late)
    (tmp_path / "run/ending.json").write_text('{"ending": "finished", "step": 6, "steps": 6}')
    shutil.rmtree(newest)
    with pytest.raises(UserError, match="rank 2 could not find rank 0 there"):
        pretrain(config, late)


def test_a_rank_that_waits_ends_when_the_others_fail(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "text.bin").write_bytes(b"")
    ranks = start_ranks(small_config(tmp_path, ELASTIC), 3, tmp_path)
    assert codes(ranks) == [2, 2, 2]
    assert "all ranks must take part in the run, but rank" in said(tmp_path, 2)


def test_two_runs_that_meet_are_refused_by_name(tmp_path: Path) -> None:
    write_text(tmp_path)
    mine = small_config(tmp_path, ELASTIC)
    others = small_config(tmp_path, ELASTIC | {"name": "other", "optimizer.learning_rate": 0.1})

    def meeting(rank: int) -> None:
        if rank == 1:
            mine.__dict__.update(others.__dict__)

    assert codes(start_ranks(mine, 2, tmp_path, sabotage=meeting)) == [2, 2]
    sentence = (
        "all ranks must be of one run, but rank 1 has other settings than rank 0: name (other, not small), "
        "optimizer.learning_rate (0.1, not 0.003); give them one config, or each run a rendezvous of its own "
        "(torchrun's --rdzv-id)."
    )
    assert sentence in said(tmp_path, 1)
    assert "rank 1 ended with UserError" in said(tmp_path, 0) + said(tmp_path, 1)
    auto, never, here, there = (shared_settings(mine, resume) for resume in ("auto", "never", "/a/step-4", "/b/step-4"))
    assert here == there
    assert {name for name in auto if auto[name] != never[name]} == {"--resume"}
    assert auto["--resume"] != here["--resume"] != shared_settings(mine, "s3://bucket/step-4")["--resume"]


def test_of_two_sessions_in_one_folder_the_later_one_writes(tmp_path: Path) -> None:
    first = Lease(tmp_path / "session", new_session_id())
    first.check()
    second = Lease(tmp_path / "session", new_session_id())
    second.check()
    with pytest.raises(UserError, match=r"output_dir must have one session at a time, but in .* another has begun on"):
        first.check()
    first.release()
    second.check()
    second.release()
    assert not (tmp_path / "session").exists()
    with pytest.raises(UserError, match=r"in .* another has begun and ended .*; this one ends"):
        first.check()


def test_a_session_that_lost_its_folder_to_another_saves_nothing_more(tmp_path: Path) -> None:
    write_text(tmp_path)

    def usurped(rank: int) -> None:
        from megahead.train.log import RunLogger

        note = RunLogger.log_event

        def noted(logger: RunLogger, kind: str, *arguments: Any) -> None:
            note(logger, kind, *arguments)
            if kind == "checkpoint":
                Lease(tmp_path / "run/session", new_session_id()).release()

        RunLogger.log_event = noted  # type: ignore[method-assign, assignment]

    config = small_config(tmp_path, {"training.log_seconds": 1000})
    assert codes(start_ranks(config, 2, tmp_path, sabotage=usurped)) == [2, 2]
    assert "output_dir must have one session at a time" in said(tmp_path, 0) + said(tmp_path, 1)
    assert [without_digits(path.name) for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000003"]


def test_a_change_of_the_mesh_is_told_once(tmp_path: Path) -> None:
    log, two, one = (
        tmp_path / "metrics.jsonl",
        {"tensor": 1, "data": 2, "waiting": 0},
        {"tensor": 1, "data": 1, "waiting": 1},
    )
    assert previous_mesh(log, two) is None
    log.write_text(
        '{"step":0,"session":{"mesh":{"tensor":1,"data":2,"waiting":0}}}\n{"step":1,"loss":1}\n{"step":2,"session":{'
    )
    assert previous_mesh(log, two) is None
    assert previous_mesh(log, one) == two
    told = ("mesh now", "1 tensor x 1 data rank, 1 waits; 1 tensor x 2 data ranks before")
    assert describe_mesh(one, two) == told
    with log.open("a") as lines:
        lines.write("mesh\0\n")  # no JSON: the machine lost its power
    assert previous_mesh(log, one) == two
    log.write_text('{"step":0,"session":{"resumed":null}}\n')  # an earlier version's
    assert previous_mesh(log, one) is None
