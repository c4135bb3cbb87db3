"""Lazy imports: a package's names are imported when they are first used.

torch takes a second to import and transformers three more; `--help` and errors in paths do not wait for them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

SLOW_PACKAGES = ("torch", "transformers", "deepspeed", "lm_eval", "datasets", "matplotlib", "scipy", "sklearn")
"""Packages whose import takes from half a second to several, on a busy machine a minute."""


def lazy_getattr(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. `names`: its public names, by the submodule that is imported when one is used."""
    module_by_name = {name: module for module, exported in names.items() for name in exported}

    def import_name(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_by_name[name]}"), name)

    return import_name


@contextmanager
def slow_imports_reported() -> Iterator[None]:
    """In the block, writes `loading NAME` to stderr before the first import of a slow package, on rank 0 only."""
    finder = _SlowImportReporter()
    is_nested = any(isinstance(other, _SlowImportReporter) for other in sys.meta_path)
    if not is_nested and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _SlowImportReporter(MetaPathFinder):
    """Finds no module: the import system asks it first, before it loads one."""

    def __init__(self) -> None:
        self._has_reported = False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in SLOW_PACKAGES and not self._has_reported:
            self._has_reported = True
            print(f"loading {fullname}", file=sys.stderr, flush=True)
