"""Settings that DeepSpeed accepts but trains wrongly with are refused before anything starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megahead.distributed import Mesh
from megahead.engine import Engine
from megahead.errors import ConfigError


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_half_precision_without_zero_is_refused_with_a_way_out(key: str) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    config = {"train_batch_size": 1, key: {"enabled": True}}
    with pytest.raises(ConfigError, match=f"at least 1 with {key}.enabled .* use stage 1"):
        Engine(
            module,
            optimizer=optimizer,
            config=config,
            mesh=Mesh(),
            device=torch.device("cpu"),
            weights=module.state_dict().__getitem__,
        )
