"""Lazy imports: a package's names are imported when they are first used.

torch takes a second to import and transformers three more; printing a command's options, or that a path is wrong, does
not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def on_first_use(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: imports a module of its own when one of the module's `names` is first used."""
    modules = {name: module for module, exported in names.items() for name in exported}

    def look_up(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return look_up
