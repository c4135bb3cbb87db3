"""Two "nodes" on one machine: two launchers that find each other over loopback train as one process does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.commands import ROOT, SCRIPT, config_file, free_port, losses
from support.forked import run_script

LAUNCH = ROOT / "launch"
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def start(*command: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, **variables},
        cwd=ROOT,
    )


def finish(nodes: list[subprocess.Popen[str]]) -> list[str]:
    """What each node said, once all have ended well."""
    try:
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    for node, output in zip(nodes, outputs, strict=True):
        assert node.returncode == 0, output
    return outputs


def launchers(folder: Path, port: str) -> dict[str, list[list[str]]]:
    """For each launcher, the command of each node."""
    hostfile = folder / "hostfile"
    hostfile.write_text("node-0 slots=1\nnode-1 slots=1\n")
    address = ["--master_addr", "127.0.0.1", "--master_port", port]
    deepspeed = ["-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--no_ssh", *address]
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *address]
    return {
        name: [[*command, "--node_rank", str(node)] for node in range(2)]
        for name, command in {"deepspeed": deepspeed, "torchrun": torchrun}.items()
    }


OPTIONS = ("--set", "training.steps=4", "--config")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses."""
    folder = tmp_path_factory.mktemp("one")
    assert run_script(SCRIPT, *OPTIONS, config_file(folder)).returncode == 0
    return losses(folder)


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_two_nodes_over_loopback_train_as_one_process(tmp_path: Path, launcher: str, one_process: list[float]) -> None:
    config = config_file(tmp_path, {"parallel.tensor": 2})
    commands = launchers(tmp_path, free_port())[launcher]
    first, second = finish([start(*command, SCRIPT, *OPTIONS, config) for command in commands])
    assert "finished at step 4" in first
    assert "finished at step" not in second
    assert losses(tmp_path) == pytest.approx(one_process, abs=1e-5)


def test_processes_that_know_only_what_srun_tells_find_each_other(tmp_path: Path) -> None:
    config, port = config_file(tmp_path), free_port()
    ranks = [
        start(
            SCRIPT,
            "--config",
            config,
            SLURM_PROCID=str(rank),
            SLURM_LOCALID="0",
            SLURM_NTASKS="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(2)
    ]
    assert "on          2 x cpu" in finish(ranks)[0]


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
