"""Groups as values, the mesh, and what a launcher's environment means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megahead.distributed.group import Group, Mesh
from megahead.distributed.launch import Launch, read_launch
from megahead.errors import ConfigError, UserError
from support.on_ranks import on_ranks


def talk(group: Group) -> dict[str, object]:
    mine = torch.tensor([float(group.rank)])
    side = group.new_gloo_group()
    return {
        "sum": group.all_reduce_(mine.clone()).item(),
        "max": group.all_reduce_max_(mine.clone()).item(),
        "gather": group.all_gather(mine).flatten().tolist(),
        "objects": side.all_gather_objects(f"rank {group.rank}"),
        "first": group.broadcast_object({"rank": group.rank}),
        "shard": group.shard(torch.arange(8), 0).tolist(),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_hears_all(size: int) -> None:
    for rank, heard in enumerate(on_ranks(size, talk)):
        assert heard["sum"] == sum(range(size))
        assert heard["max"] == size - 1
        assert heard["gather"] == list(range(size))
        assert heard["objects"] == [f"rank {r}" for r in range(size)]
        assert heard["first"] == {"rank": 0}
        assert heard["shard"] == list(range(8))[rank * 8 // size : (rank + 1) * 8 // size]


class Called(TorchDispatchMode):
    """Knows which operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


COPIES = {"aten::cat", "aten::stack", "aten::clone", "aten::copy_", "aten::_to_copy"}


def copies(group: Group, dim: int) -> int:
    """Tensors copied on this rank beside those received."""
    with Called() as called:
        group.unshard(torch.ones(4, 4), dim)
    return sum(name in COPIES for name in called.names)


@pytest.mark.parametrize(("dim", "expected"), [(0, 0), (1, 1)])
def test_parts_are_received_where_they_belong_or_copied_once(dim: int, expected: int) -> None:
    assert on_ranks(2, copies, dim) == [expected] * 2


def messages(group: Group) -> tuple[list[str], list[str]]:
    """What is sent by a gathering and by a scattered sum."""
    sent = []
    for collective in (Group.all_gather, Group.reduce_scatter):
        with Called() as called:
            collective(group, torch.ones(4, 4))
        sent.append([name for name in called.names if name.startswith("c10d::")])
    return sent[0], sent[1]


def test_gathered_and_scattered_tensors_travel_whole_and_not_as_lists_of_parts() -> None:
    """Lists would be copied together on GPUs, there and back."""
    assert on_ranks(2, messages) == [(["c10d::_allgather_base_"], ["c10d::_reduce_scatter_base_"])] * 2


def test_one_rank_needs_no_process_group() -> None:
    heard = talk(Group())
    assert heard["sum"] == 0
    assert heard["gather"] == [0]
    assert heard["shard"] == list(range(8))


def test_a_group_cannot_shard_unevenly() -> None:
    with pytest.raises(ValueError, match="cannot be split evenly over 3 ranks"):
        Group(0, 3).shard(torch.arange(8), 0)


def places(group: Group) -> tuple[int, int, int, int, list[float], list[float]]:
    mesh = Mesh.build(group, tensor_size=2)
    mine = torch.tensor([float(group.rank)])
    neighbours = mesh.tensor_group.all_gather(mine).flatten().tolist()
    column = mesh.data_group.all_gather(mine).flatten().tolist()
    return (
        mesh.tensor_group.rank,
        mesh.tensor_group.size,
        mesh.data_group.rank,
        mesh.data_group.size,
        neighbours,
        column,
    )


def test_tensor_groups_are_consecutive_ranks() -> None:
    assert on_ranks(4, places) == [
        (0, 2, 0, 2, [0, 1], [0, 2]),
        (1, 2, 0, 2, [0, 1], [1, 3]),
        (0, 2, 1, 2, [2, 3], [0, 2]),
        (1, 2, 1, 2, [2, 3], [1, 3]),
    ]


def test_a_mesh_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"`parallel.tensor` must divide the number of ranks \(4\), but is 3"):
        Mesh.build(Group(0, 4), tensor_size=3)


def launched(*ranks: Any) -> Launch:
    return Launch(*ranks, has_launcher=True)


def test_launchers_are_understood() -> None:
    assert read_launch({"LAUNCH_ID": "7"}) == Launch(launch_id="7")
    assert read_launch({}) == Launch()
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    assert read_launch(torchrun) == launched(3, 4, 1, "node0", 1234)
    slurm = srun_task() | {"MASTER_ADDR": "n", "MASTER_PORT": "1"}
    assert read_launch(slurm) == launched(3, 4, 1, "n", 1)
    assert read_launch(slurm | {"CUDA_VISIBLE_DEVICES": "0,1"}) == launched(3, 4, 1, "n", 1)
    assert read_launch(slurm | {"CUDA_VISIBLE_DEVICES": "1"}) == launched(3, 4, 0, "n", 1)  # --gpus-per-task


def test_a_process_of_mpirun_has_its_rank_from_open_mpi_unless_a_launcher_in_it_sets_another() -> None:
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    place = {"MASTER_ADDR": "n", "MASTER_PORT": "1"}
    assert read_launch(mpi | place) == launched(3, 4, 1, "n", 1)
    daemon = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read_launch(mpi | daemon | place) == launched(3, 4, 1, "n", 1)  # in a job of Slurm, on another node
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}
    assert read_launch(mpi | torchrun | place) == launched(5, 8, 2, "n", 1)
    assert read_launch(mpi | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == launched()
    with pytest.raises(UserError, match="`MASTER_ADDR` must be set in the environment when OMPI_COMM_WORLD_SIZE is 4"):
        read_launch(mpi)
    for size in ("1", "8"):
        with pytest.raises(UserError, match=r"must be OMPI_COMM_WORLD_SIZE \(4\) where mpirun starts the ranks"):
            read_launch(mpi | place | {"WORLD_SIZE": size})


def srun_task(rank: str = "3") -> dict[str, str]:
    """What srun tells one of four tasks."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
    return step | {"SLURM_PROCID": rank, "SLURM_LOCALID": "1"}


def test_a_task_that_lacks_its_number_of_tasks_is_refused_on_all_ranks() -> None:
    """As in a container that passes some of Slurm's variables on; rank 0 would train beside the others' errors."""
    for rank in ("0", "1"):
        task = {name: value for name, value in srun_task(rank).items() if name != "SLURM_STEP_NUM_TASKS"}
        with pytest.raises(UserError, match="`SLURM_STEP_NUM_TASKS` must be set in the environment"):
            read_launch(task | {"MASTER_ADDR": "n", "MASTER_PORT": "1"})


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # salloc, on the login node
        srun_task("0") | {"SLURM_STEP_ID": "4294967290", "SLURM_LOCALID": "0"},  # salloc, a shell on the first node
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a script of sbatch
        srun_task("0") | {"SLURM_STEP_ID": "4294967291", "SLURM_LOCALID": "0"},  # the same, of other versions
    ],
)
def test_a_slurm_job_runs_one_process_where_srun_does_not_start_more(shell: dict[str, str]) -> None:
    for change in ({}, {"MASTER_ADDR": "n", "MASTER_PORT": "1"}):
        assert read_launch(shell | change) == Launch(slurm_tasks=4)
    assert read_launch(srun_task("0") | {"SLURM_STEP_NUM_TASKS": "1"}) == launched()  # srun -n 1 in a larger job


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "`MASTER_ADDR` must be set in the environment when SLURM_STEP_NUM_TASKS is 4, but is missing"),
        ({"SLURM_STEP_NUM_TASKS": ""}, "`SLURM_STEP_NUM_TASKS` must be set in the environment when SLURM_PROCID is 3"),
        ({"SLURM_PROCID": ""}, "`SLURM_PROCID` must be set in the environment when SLURM_STEP_NUM_TASKS is 4, but is"),
        ({"SLURM_PROCID": "4", "MASTER_ADDR": "n", "MASTER_PORT": "1"}, "`SLURM_PROCID` must be below SLURM_STEP_NUM"),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "n", "MASTER_PORT": "1"}, "`WORLD_SIZE` must be SLURM_STEP_NUM_TASKS (4) "),
        ({"WORLD_SIZE": "1"}, "`WORLD_SIZE` must be SLURM_STEP_NUM_TASKS (4) where srun starts the ranks, but is 1"),
    ],
)
def test_what_srun_left_inconsistent_is_named_by_slurms_variable(change: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        read_launch(srun_task() | change)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"MASTER_ADDR": ""}, "`MASTER_ADDR` must be set in the environment when WORLD_SIZE is 4, but is missing"),
        ({"RANK": ""}, "`RANK` must be set"),
        ({"LOCAL_RANK": ""}, "`LOCAL_RANK` must be set"),
        ({"MASTER_PORT": ""}, "`MASTER_PORT` must be set"),
        ({"WORLD_SIZE": ""}, "`WORLD_SIZE` must be set in the environment when RANK is 3, but is missing; start"),
        ({"MASTER_PORT": "http"}, "`MASTER_PORT` must be a whole number in the environment, but is 'http' instead."),
        ({"MASTER_PORT": "99999"}, "`MASTER_PORT` must be from 1 to 65535, but is 99999 instead."),
        ({"RANK": "4"}, "`RANK` must be below WORLD_SIZE (4), but is 4 instead."),
    ],
)
def test_a_launch_that_is_incomplete_names_the_variable(change: dict[str, str], sentence: str) -> None:
    good = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    with pytest.raises(UserError) as caught:
        read_launch(good | change)
    assert str(caught.value).startswith(sentence)
