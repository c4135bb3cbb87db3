"""Hosts on one machine: each a network namespace, its only link a TAP device whose frames pass through this process.

A `Wire` joins them: it may lose or delay frames, and be cut for one host. Bandwidth is not limited. Needs root, `ip`,
and /dev/net/tun, but not netem, which not every kernel has.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import selectors
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LINK = "eth0"
NAMES = Path("/run/netns")
_CLUSTERS = itertools.count()
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000
_CLONE_NEWNET = 0x40000000
_FRAME = 1 << 16


def may_make_hosts() -> bool:
    """Whether this machine lets a process make namespaces and devices in them."""
    if os.geteuid() or not shutil.which("ip") or not os.access("/dev/net/tun", os.W_OK):
        return False
    probe = "ip tuntap add dev probe mode tap && ip link set probe up"
    return not subprocess.run(["unshare", "-n", "sh", "-c", probe], capture_output=True, check=False).returncode


class Wire:
    """Passes frames between the hosts' links; what is set here counts from the next frame on."""

    def __init__(self, links: list[int]) -> None:
        self.delay = 0.0
        """Seconds that a frame takes."""
        self.loss = 0.0
        """Share of the frames that are lost."""
        self.cut: set[int] = set()
        """Hosts that no frame reaches or leaves."""
        self._links, self._chance = links, random.Random(0)
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count, self._over = 0, False
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over = True
        self._thread.join()
        for link in self._links:
            os.close(link)

    def _pass_on(self) -> None:
        selector = selectors.DefaultSelector()
        for host, link in enumerate(self._links):
            selector.register(link, selectors.EVENT_READ, host)
        while not self._over:
            pause = self._late[0][0] - time.monotonic() if self._late else 0.1
            for key, _ in selector.select(max(0.0, min(pause, 0.1))):
                self._take(key.data)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, host, frame = heapq.heappop(self._late)
                self._deliver(host, frame)

    def _take(self, host: int) -> None:
        with suppress(OSError):  # the device is gone, or has no more
            while frame := os.read(self._links[host], _FRAME):
                if host in self.cut or self._chance.random() < self.loss:
                    continue
                if not self.delay:
                    self._deliver(host, frame)
                    continue
                self._count += 1
                heapq.heappush(self._late, (time.monotonic() + self.delay, self._count, host, frame))

    def _deliver(self, sender: int, frame: bytes) -> None:
        for host, link in enumerate(self._links):
            if host != sender and host not in self.cut:
                with suppress(OSError):
                    os.write(link, frame)


class Host:
    """A namespace of its own, with the address `address`."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address = name, f"10.78.0.{number + 1}"

    def enter(self) -> None:
        """From here on this process has no network but this host's; torch's libraries are told."""
        with (NAMES / self.name).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        os.environ["GLOO_SOCKET_IFNAME"] = LINK

    def processes(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(number) for number in listed.stdout.split()]

    def kill(self) -> None:
        """All of its processes at once, as far as that goes."""
        while there := self.processes():
            for number in there:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.01)


@contextmanager
def hosts(count: int) -> Iterator[tuple[list[Host], Wire]]:
    """`count` hosts on one wire; their processes are killed in the end."""
    remove_left_over()
    cluster = next(_CLUSTERS)
    there = [Host(f"host-{os.getpid()}-{cluster}-{number}", number) for number in range(count)]
    wire = None
    try:
        wire = Wire([_plugged_in(host) for host in there])
        yield there, wire
    finally:
        for host in there:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
        if wire is not None:
            wire.close()


def remove_left_over() -> None:
    """Hosts of processes that were killed before they could remove them."""
    for there in NAMES.glob("host-*-*"):
        owner = there.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            Host(there.name, 0).kill()
            subprocess.run(["ip", "netns", "del", there.name], capture_output=True, check=False)


def _plugged_in(host: Host) -> int:
    """Makes the host; returns the file that its link's frames are read from and written to."""
    link, device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), host.name.replace("host", "h")[:15]
    fcntl.ioctl(link, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP_WITHOUT_HEADER))
    for command in (
        f"ip netns add {host.name}",
        f"ip link set {device} netns {host.name} name {LINK}",
        f"ip -n {host.name} addr add {host.address}/24 dev {LINK}",
        f"ip -n {host.name} link set {LINK} up",
        f"ip -n {host.name} link set lo up",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)
    return link
