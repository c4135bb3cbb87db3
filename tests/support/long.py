"""Cases that `make test` leaves to `make test-long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long(*case: Any, id: str | None = None, marks: Collection[pytest.MarkDecorator] = ()) -> Any:
    """A case of `pytest.mark.parametrize` that runs in `make test-long` alone."""
    return pytest.param(*case, id=id, marks=[pytest.mark.long, *marks])


def long_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases`, of which those that are not in `quick` run in `make test-long` alone."""
    every = list(cases)
    missing = [case for case in quick if case not in every]
    assert not missing, f"{missing} are no cases"
    return [case if case in quick else long(*case) if isinstance(case, tuple) else long(case) for case in every]
