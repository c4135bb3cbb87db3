"""Lazy imports: a package's names are imported when they are first used.

torch takes a second to import and transformers three more; `--help` and errors in paths do not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_getattr(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. `names`: its public names, by the submodule that is imported when one is used."""
    module_by_name = {name: module for module, exported in names.items() for name in exported}

    def import_name(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_by_name[name]}"), name)

    return import_name
