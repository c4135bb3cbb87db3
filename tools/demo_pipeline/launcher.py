"""How `launch/pretrain.py` is started on several ranks of this machine: by DeepSpeed's launcher, as anybody would."""

from __future__ import annotations

import os
import socket

import torch


def launcher(ranks: int) -> list[str]:
    """What python is given before the script's own words."""
    port = str(_free_port())  # the launcher's own may be taken: by another demo, say
    return ["-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks), "--master_port", port]


def environment(ranks: int) -> dict[str, str]:
    """Of the launcher: this process's, with the cores shared out among the ranks unless it says how."""
    cores = max(1, (os.cpu_count() or 1) // ranks)
    added = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    return {"OMP_NUM_THREADS": str(cores), **os.environ, **added, "PYTHONUNBUFFERED": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
