"""What every test has: one thread, no network, and the reference data where it is."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

os.fsync = os.fstat  # no test cuts the power: a descriptor is checked, and no disk waited for
gc.disable()  # until all is imported and collected, of which little is garbage
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def local_rank_is_forgotten() -> Iterator[None]:
    """DeepSpeed reads LOCAL_RANK, so a run leaves it in its process; what a later test starts must not see it."""
    before = os.environ.get("LOCAL_RANK")
    yield
    if before is None:
        os.environ.pop("LOCAL_RANK", None)
    else:
        os.environ["LOCAL_RANK"] = before


@pytest.fixture
def shared_data() -> Path:
    """Real texts and tokenizers that lie beside some checkouts; tests that need them skip elsewhere."""
    if not SHARED.is_dir():
        pytest.skip("needs the reference data folder beside the checkout (shared/data)")
    return SHARED


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors, since many tests wait for timeouts; at most four, for memory's sake."""
    return min((os.cpu_count() or 1) + 1, 4)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where tests are run; with `-n` that is in the workers, and not where they are handed out."""
    if session.config.getoption("dist", "no") == "no":
        importlib.import_module("support.heavy_imports")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: no later collection of garbage walks through it."""
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow ones come first, so that no worker is left with one at the end while the others have nothing to do; before
    them, in workers that did nothing yet, those that measure memory."""
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("peaks", "slow")])
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not importlib.import_module("torch").cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
