"""Clears DeepSpeed's process-wide state, so that the next run finds neither this run's ranks nor its model."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def deepspeed_session() -> Iterator[None]:
    """Inside, engines are built and closed; afterwards DeepSpeed remembers no groups of ranks and no modules.

    Without it an engine built on other connections than the last one is refused ("Group ... is not registered").
    """
    try:
        yield
    finally:
        if "deepspeed" in sys.modules:
            _forget_ranks()
            _forget_modules()


def _forget_ranks() -> None:
    """Does what `deepspeed.comm.destroy_process_group` does, except for ending the groups themselves."""
    with suppress(AttributeError):  # an older DeepSpeed
        importlib.import_module("deepspeed.utils.groups")._release_process_group_references()


def _forget_modules() -> None:
    """Clears a stack and a method's cache, which keep the last model alive at stage 3."""
    importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    with suppress(AttributeError, KeyError):  # another DeepSpeed's method may have none
        method = coordinator.PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(method).nonlocals["func"].cache_clear()
