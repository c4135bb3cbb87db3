"""How `launch/pretrain.py` is started on several ranks of this machine: by DeepSpeed's launcher, as anybody would."""

from __future__ import annotations

import os
import socket

import torch


def launcher(ranks: int) -> list[str]:
    """What python is given before the script's own words."""
    port = str(_free_port())  # the launcher's own may be taken: by another demo, say
    return ["-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks), "--master_port", port]


def environment() -> dict[str, str]:
    """Of the launcher; how its ranks share the cores is the command's own affair."""
    added = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    return {**os.environ, **added, "PYTHONUNBUFFERED": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
