"""Checks this machine for what training needs: what is missing, and what to do about it.

megahead doctor [--output-dir runs] [--hostfile launch/hostfile] [--port 29500]

Every line is a check: ok, a note (works without it, slower or smaller), or a problem. Exit code 1 with any problem.
Installs and changes nothing; takes a few seconds.
"""
# Top-level imports are limited to the standard library, so that it runs before anything is installed.

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megahead.wording import GIB, pluralize

if TYPE_CHECKING:
    from rich.table import Table


STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    subject: str
    state: Literal["ok", "note", "problem"]
    detail: str
    advice: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs"), help="where runs will be written")
    parser.add_argument("--hostfile", type=Path, help="DeepSpeed's list of hosts, for several nodes")
    parser.add_argument("--port", type=int, default=29500, help="where ranks will meet (default: 29500)")
    arguments = parser.parse_args()
    for name in ("psutil", "rich", "torch"):
        if importlib.util.find_spec(name) is None:
            sys.exit(
                f"error: {name} must be installed, but is not; run `make install`, then `source .venv/bin/activate` "
                "(outside of a checkout: pip install megahead)."
            )
    from rich.console import Console

    findings = [
        Finding("Python", "ok", sys.version.split()[0]),  # the package cannot be installed on an unsupported one
        *packages(),
        *devices(),
        compiler(),
        *memory(),
        disk(arguments.output_dir),
        collectives(),
        port(arguments.port),
        *([] if arguments.hostfile is None else hosts(arguments.hostfile)),
    ]
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table(findings))
    problems = sum(finding.state == "problem" for finding in findings)
    print("\nready to train" if not problems else f"\n{problems} to repair before training")
    return int(problems > 0)


def table(findings: list[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", "check", "found", "what to do"):
        result.add_column(column, overflow="fold")
    for finding in findings:
        state = Text(finding.state, style=STYLES[finding.state])
        result.add_row(state, *map(Text, (finding.subject, finding.detail, finding.advice)))
    return result


def packages() -> Iterator[Finding]:
    """Checks the packages that training imports, then those that make it faster."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it has to guess
    for name in ("torch", "deepspeed", "transformers", "lm_eval", "datasets"):
        yield package(name, "problem", "`make install`, or pip install megahead")
    if torch.cuda.is_available():
        yield package("flash_attn", "note", "torch's kernel replaces it; on Hopper or newer: `pip install -e '.[gpu]'`")
        yield package("triton", "note", "pip install triton: the kernel of the loss")


def package(name: str, failure_state: Literal["note", "problem"], advice: str) -> Finding:
    """Checks that `name` can be imported, not only that it is installed."""
    try:
        module = importlib.import_module(name)  # a distribution of another name may have it, such as pytorch-triton
        version = getattr(module, "__version__", None) or importlib.metadata.version(name.replace("_", "-"))
        return Finding(name, "ok", version)
    except Exception as error:  # a package may fail to load in any way (a missing library, another CUDA)
        reason = " ".join(str(error).split())[:120]
        return Finding(name, failure_state, f"{type(error).__name__}: {reason}", advice)


def devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        advice = "small models only; check the driver with nvidia-smi if there is a GPU"
        build = f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch built for CPUs"
        yield Finding("GPU", "note", f"none seen; {build}", advice)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        detail = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, sm_{properties.major}{properties.minor}"
        bf16 = properties.major >= 8
        yield Finding(f"GPU {index}", "ok" if bf16 else "note", detail, "" if bf16 else "no bf16: use precision: fp16")


def compiler() -> Finding:
    """Checks for a C++ compiler, which torch.compile and Triton need to build kernels."""
    path = shutil.which("g++") or shutil.which("clang++")
    if path is None:
        return Finding("C++ compiler", "note", "none", "apt install g++: for engine.compile and Triton kernels")
    return Finding("C++ compiler", "ok", path)


def memory() -> Iterator[Finding]:
    from megahead.host_memory import available_memory

    (available, total), cores = available_memory(), pluralize(os.cpu_count() or 1, "core")
    detail = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free, {cores}"
    low = available < 2 * GIB
    yield Finding(
        "memory", "note" if low else "ok", detail, "close other programs: the demo takes 2 GiB" if low else ""
    )
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = free < GIB // 2
        advice = "docker run --shm-size=8g: ranks on one node talk through it" if small else ""
        yield Finding("shared memory", "problem" if small else "ok", f"{free / GIB:.1f} GiB free in /dev/shm", advice)


def disk(folder: Path) -> Finding:
    """Checks free space and write permission in the folder for runs, or its nearest existing parent."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if not existing.is_dir():
        return Finding("disk", "problem", f"{existing} is a file", "name another --output-dir")
    if not os.access(existing, os.W_OK):
        return Finding("disk", "problem", f"{existing} cannot be written to", "name another --output-dir")
    advice = "a checkpoint takes 12 bytes a parameter" if free < 10 * GIB else ""
    return Finding("disk", "note" if advice else "ok", f"{free / GIB:.0f} GiB free at {existing}", advice)


def collectives() -> Finding:
    """Checks torch.distributed's backends."""
    import torch

    if not torch.distributed.is_available():
        return Finding("collectives", "problem", "none", "install a torch with torch.distributed")
    backends = {"nccl": torch.distributed.is_nccl_available, "gloo": torch.distributed.is_gloo_available}
    available = [name for name, is_available in backends.items() if is_available()]
    needed = "nccl" if torch.cuda.is_available() else "gloo"
    if needed not in available:
        return Finding("collectives", "problem", ", ".join(available) or "none", f"install a torch with {needed}")
    return Finding("collectives", "ok", ", ".join(available))


def port(number: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number or -1))  # the system would choose a port for 0
        except PermissionError as error:
            return Finding("port", "problem", f"{number}: {error.strerror}", "pass a --master_port from 1024 on")
        except OSError as error:
            return Finding("port", "problem", f"{number}: {error.strerror}", "pass --master_port, or end its process")
        except OverflowError:
            return Finding("port", "problem", f"{number} is no port", "give one from 1 to 65535")
    return Finding("port", "ok", f"{number} is free")


def hosts(hostfile: Path) -> Iterator[Finding]:
    """Checks that each line is `HOST slots=N`, and that each host has an address and accepts SSH connections."""
    try:
        lines = [line.split("#")[0].strip() for line in hostfile.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        yield Finding("hostfile", "problem", f"{hostfile}: {reason}", "see launch/hostfile for an example")
        return
    if not any(lines):
        yield Finding("hostfile", "problem", f"{hostfile}: no host", "write HOST slots=N, a line for each")
    for line in filter(None, lines):
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        yield Finding("hostfile", "problem", line, "write HOST slots=N") if match is None else host(match[1])


def host(name: str, connect: Callable[..., socket.socket] = socket.create_connection) -> Finding:
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return Finding(f"host {name}", "problem", "no address", "check the name, or add it to /etc/hosts")
    try:
        connect((address, 22), timeout=3).close()
    except OSError as error:
        advice = "start sshd there, or launch with torchrun or srun, which need none"
        return Finding(f"host {name}", "note", f"{address}, no SSH ({error})", advice)
    return Finding(f"host {name}", "ok", f"{address}, SSH answers")
