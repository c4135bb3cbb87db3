"""Nodes of an elastic run: namespaces with a network, processes, a name and a memory (/dev/shm) of their own.

They share a disk, a small file system in a file, so that it can be filled. Each runs launch/elastic.sh as users do, but
for two wrappers, around torchrun and around the training script, by which clocks jump and bits flip. A node that is
killed takes its memory along.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megahead.errors import UserError
from megahead.files import atomic_path
from soak.hosts import LINK, Host

BYTES = 1 << 29
_LEFT = 1 << 16


@dataclass(frozen=True)
class Disk:
    """Mounted at `place`."""

    place: Path

    def fill(self) -> None:
        fill(self.place)

    def empty(self) -> None:
        empty(self.place)


@contextmanager
def mounted(folder: Path) -> Iterator[Disk]:
    """What is on it stays in `folder`/disk.img."""
    image, place = folder / "disk.img", folder / "disk"
    place.mkdir(exist_ok=True)
    if place.is_mount():  # a sitting before was killed
        _call("umount", "-l", place)
    if not image.exists():
        with atomic_path(image) as partial:
            with partial.open("xb") as file:
                os.truncate(file.fileno(), BYTES)
            _call("mkfs.ext4", "-q", "-m", "0", partial)
    _call("mount", "-o", "loop", image, place)
    try:
        yield Disk(place)
    finally:
        _call("umount", "-l", place)


def fill(folder: Path) -> None:
    """Takes all but some bytes of the file system that it lies in."""
    with suppress(OSError), (folder / "ballast").open("xb") as file:
        there = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, max(1, there.f_bavail * there.f_frsize - _LEFT))


def empty(folder: Path) -> None:
    with suppress(OSError):
        (folder / "ballast").unlink()


def _call(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"`{' '.join(map(str, command))}` must work, but does not ({done.stderr.strip()}).")


ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
MEMORY_MIB = 48
"""Of each node's /dev/shm."""

PORT = 29400
_APART = "unshare --mount --uts --pid --fork --mount-proc --kill-child"
_MEETING = (
    "import signal, torch.distributed as d; "
    f"s = d.TCPStore('0.0.0.0', {PORT}, is_master=True, wait_for_workers=False); signal.pause()"
)


@dataclass
class Machine(ABC):
    """A host that runs one command; its processes end with it, and with this process."""

    host: Host
    log: Path
    away: bool = field(default=False, init=False)
    """Whether nothing is to start it."""

    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @abstractmethod
    def begin(self) -> None:
        """Starts it, where it does not run."""

    def start(self, command: str, environment: dict[str, str]) -> None:
        if self.runs():
            return
        words = f"setpriv --pdeathsig KILL ip netns exec {self.host.name} {_APART} sh -c".split()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*words, command],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """As one that loses its power: all processes at once, and its memory."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.host.kill()

    def first(self) -> psutil.Process | None:
        """The command's process, from which all others descend."""
        with suppress(psutil.NoSuchProcess):
            if self._process is not None and self.runs():
                return next(iter(psutil.Process(self._process.pid).children()), None)
        return None

    def send(self, number: int) -> None:
        """A signal to all processes."""
        for process in self.host.processes():
            with suppress(ProcessLookupError):
                os.kill(process, number)


@dataclass
class Node(Machine):
    """One that trains with a rank."""

    number: int
    folder: Path
    command: Sequence[str]
    nodes: str
    """Least and most that train together."""

    pace: float
    """Seconds that a step takes at least."""

    def begin(self) -> None:
        """Or goes on."""
        self.folder.mkdir(exist_ok=True)
        environment = {
            "NODES": self.nodes,
            "RANKS": "1",
            "RESTARTS": "1000000",
            "ADDRESS": self.host.address,
            "RDZV": "is_host=false",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LINK,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "SOAK_NODE": str(self.folder),
            "SOAK_PACE": str(self.pace),
        }
        memory = f"mount -t tmpfs -o size={MEMORY_MIB}m none /dev/shm && hostname node-{self.number}"
        self.start(f"{memory} && exec {shlex.join(self.command)}", environment)

    def put_right(self) -> None:
        """Ends what a sitting that was killed has left: a clock that runs ahead, a bit that is to flip."""
        for name in ("ahead", "flip"):
            (self.folder / name).unlink(missing_ok=True)

    def ask_to_leave(self) -> None:
        """As a scheduler does, before it takes the node."""
        if agent := self.first():
            agent.send_signal(signal.SIGTERM)

    def rank(self) -> psutil.Process | None:
        """Its training process."""
        for process in self._descendants():
            with suppress(psutil.NoSuchProcess):
                if str(HERE / "rank.py") in process.cmdline():
                    return process
        return None

    def memory(self) -> Path | None:
        """Its /dev/shm, as seen from here."""
        agent = self.first()
        return None if agent is None else Path(f"/proc/{agent.pid}/root/dev/shm")

    def _descendants(self) -> Iterator[psutil.Process]:
        """But for the first, in whose words the script is, too."""
        if agent := self.first():
            with suppress(psutil.NoSuchProcess):
                yield from agent.children(recursive=True)


@dataclass
class MeetingPlace(Machine):
    """A machine that trains nothing, with the store by which agents meet."""

    def begin(self) -> None:
        """Or goes on, and knows nothing of the agents that met there before."""
        self.start(f"exec {shlex.join([sys.executable, '-c', _MEETING])}", {})


def node_script(folder: Path) -> Path:
    """launch/elastic.sh with both wrappers."""
    text = (ROOT / "launch/elastic.sh").read_text(encoding="utf-8")
    changes = {
        ".venv/bin/python -m megahead.distributed.agent": f"{sys.executable} {HERE / 'agent.py'}",
        "launch/pretrain.py": str(HERE / "rank.py"),
    }
    for word, instead in changes.items():
        if text.count(word) != 1:
            raise UserError(f"launch/elastic.sh must name {word} once, but does not.")
        text = text.replace(word, instead)
    script = folder / "elastic.sh"
    script.write_text(text, encoding="utf-8")
    return script
