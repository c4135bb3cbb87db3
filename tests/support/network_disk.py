"""A disk as a client of NFS sees it: a name that was missing stays missing until its folder is opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class NetworkDisk:
    """From its creation on, what this process sees below `root`."""

    def __init__(self, root: Path) -> None:
        self._root, self._missing, self._lstat = root, set[Path](), os.lstat
        for name in ("stat", "lstat", "open", "listdir", "scandir", "mkdir"):
            setattr(os, name, self._looking(name))

    def require(self, path: Path) -> None:
        """FileNotFoundError for a path that this client takes for missing."""
        for name in [*reversed(path.parents), path]:
            if self._root not in name.parents:
                continue
            if name not in self._missing:
                try:
                    self._lstat(name)
                except FileNotFoundError:
                    self._missing.add(name)
            if name in self._missing:
                raise FileNotFoundError(2, "No such file or directory, as far as this client knows", str(name))

    def _looking(self, function: str) -> Any:
        original = getattr(os, function)

        def look(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and not options.get("dir_fd"):
                absolute = Path(path).absolute()
                creates = function == "mkdir" or (function == "open" and arguments and arguments[0] & os.O_CREAT)
                self.require(absolute.parent if creates else absolute)
                if function in ("listdir", "scandir") or (arguments and arguments[0] == os.O_RDONLY | os.O_DIRECTORY):
                    self._missing = {name for name in self._missing if name.parent != absolute}
                elif creates:
                    self._missing.discard(absolute)
            return original(path, *arguments, **options)

        return look
