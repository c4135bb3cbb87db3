"""Shared fixtures. The heavy imports below are made once here, else every forked rank makes them again."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which torch's own modules below may do

import torch._dynamo
import torch.testing
import torch.utils.tensorboard

from megahead.engine.start import load_deepspeed

torch.set_num_threads(1)
load_deepspeed(torch.device("cpu"))  # ranks of tests are CPU processes; GPU runs are processes of their own

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """Real texts and tokenizers that lie beside some checkouts; tests that need them skip elsewhere."""
    if not SHARED.is_dir():
        pytest.skip("needs the reference data folder beside the checkout (shared/data)")
    return SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)
