"""Two "nodes" on one machine: two launchers that find each other over loopback train as one process does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from support.commands import CPU, DEEPSPEED, SCRIPT, TORCHRUN, config_file, free_port, losses
from support.forked import ROOT, Script, fork_pythons, run_script

LAUNCH = ROOT / "launch"


def launchers(folder: Path, port: str) -> dict[str, list[str]]:
    """For each launcher, the command that a node adds its number to."""
    hostfile = folder / "hostfile"
    hostfile.write_text("node-0 slots=1\nnode-1 slots=1\n")
    address = ["--master_addr", "127.0.0.1", "--master_port", port]
    deepspeed = [DEEPSPEED, "--hostfile", str(hostfile), "--no_ssh", *address]
    torchrun = [TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", *address]
    return {"deepspeed": deepspeed, "torchrun": torchrun}


OPTIONS = ("--set", "training.steps=4", "--config")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses."""
    folder = tmp_path_factory.mktemp("one")
    assert run_script(SCRIPT, *OPTIONS, config_file(folder)).returncode == 0
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_two_nodes_over_loopback_train_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, one_process: list[float]
) -> None:
    fork_pythons(monkeypatch)
    config = config_file(tmp_path, {"parallel.tensor": 2})
    command = launchers(tmp_path, free_port())[launcher]
    nodes = [Script(*command, "--node_rank", node, SCRIPT, *OPTIONS, config, environment=CPU) for node in range(2)]
    first, second = (node.done() for node in nodes)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "finished at step 4" in first.stdout
    assert "finished at step" not in second.stdout
    assert losses(tmp_path) == pytest.approx(one_process, abs=1e-5)


def test_processes_that_know_only_what_srun_tells_find_each_other(tmp_path: Path) -> None:
    config, port = config_file(tmp_path), free_port()
    told = {"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [Script(SCRIPT, "--config", config, environment={**told, "SLURM_PROCID": str(r)}) for r in range(2)]
    first, second = (rank.done() for rank in ranks)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "on          2 x cpu" in first.stdout


def test_a_run_in_a_shell_of_salloc_is_one_process_and_says_how_to_start_more(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    done = Script(SCRIPT, "--config", config, environment={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}).done()
    assert done.returncode == 0, done.stderr
    assert "on          1 x cpu (SLURM_NTASKS is 4: srun starts as many ranks)" in done.stdout


def test_the_files_in_launch_are_well_formed_and_start_the_one_entry() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (arguments,) = pod["containers"][0]["args"]
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']}" in arguments
    slurm = (LAUNCH / "slurm.sh").read_text()
    assert subprocess.run(["bash", "-n", LAUNCH / "slurm.sh"], check=False).returncode == 0
    for text in (arguments, slurm):
        assert "launch/pretrain.py --config" in text
    lines = [line for line in (LAUNCH / "hostfile").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"\S+ slots=\d+", line) for line in lines)
