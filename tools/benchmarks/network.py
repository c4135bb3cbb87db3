"""Network namespaces, each behind a link of a given rate: machines for ranks. Needs root, and iproute2's ip and tc."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megahead.errors import UserError

LINK = "eth0"
_CLONE_NEWNET = 0x40000000
_SENT = 8  # of the numbers in a line of /proc/PID/net/dev


@contextmanager
def linked(count: int, megabits: int) -> Iterator[list[str]]:
    """Names of `count` namespaces at one switch; what goes to or comes from each passes a link of that rate."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise UserError("this benchmark needs root and iproute2 (ip, tc) to limit links, but one of them is missing.")
    prefix = f"megahead-{os.getpid()}"
    hub, ends = f"{prefix}-hub", [f"{prefix}-{k}" for k in range(count)]
    try:
        _call(f"ip netns add {hub}")
        _call(f"ip -n {hub} link add name switch type bridge")
        _call(f"ip -n {hub} link set switch up")
        for k, end in enumerate(ends):
            _plug_in(hub, end, k, megabits)
        yield ends
    finally:
        for name in (*ends, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def enter(namespace: str) -> None:
    """From here on this process, which has one thread, has no network but that namespace's; gloo is told."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


def sent_bytes(process: int | None) -> int:
    """Bytes that have left through the link of a process's namespace so far, all headers included."""
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    numbers = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{LINK}:"))
    return int(numbers[_SENT])


def _plug_in(hub: str, end: str, number: int, megabits: int) -> None:
    port, shape = f"port{number}", f"root tbf rate {megabits}mbit burst 1mb limit 10mb"
    _call(f"ip netns add {end}")
    _call(f"ip -n {hub} link add name {port} type veth peer name {LINK} netns {end}")
    _call(f"ip -n {hub} link set {port} master switch up")
    _call(f"ip -n {end} addr add 10.77.0.{number + 1}/24 dev {LINK}")
    for device in (LINK, "lo"):
        _call(f"ip -n {end} link set {device} up")
    _call(f"tc -n {end} qdisc add dev {LINK} {shape}")
    _call(f"tc -n {hub} qdisc add dev {port} {shape}")


def _call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"`{command}` must work, but does not ({done.stderr.strip()}).")
