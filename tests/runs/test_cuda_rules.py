"""Deterministic runs use no operator that deterministic algorithms refuse on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megahead.engine.engine import Engine
from megahead.train.run import pretrain
from support.cuda_rules import DeterministicCuda
from support.small_run import small_config, stage, write_text

MASKS = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
BERT = {"family": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "max_positions": 32}
ENCODER = {"model": BERT, "masking": MASKS}
MODERNBERT = ENCODER | {"model": BERT | {"family": "modernbert", "local_window": 6}}
RETROMAE, TSDAE = {"retromae": {"bag_weight": 1.0}, "group_samples": 2}, {"tsdae": {"deletion_rate": 0.5}}


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"multi_token": {"heads": 2}}},
        {"engine.embedding": "rows"} | stage(1),
        MODERNBERT | {"objective": {"replaced_tokens": {}}},
        ENCODER | {"objective": {"replaced_tokens": {"draws": "vocabulary"}}},
        ENCODER | {"objective": RETROMAE},
        ENCODER | {"objective": TSDAE},
        ENCODER | {"objective": {"phrases": {"group_samples": 2}, "group_samples": 2}},
        ENCODER | {"masking": MASKS | {"strategy": "hardest", "adapt_every": 2}},
        ENCODER | {"masking": MASKS | {"masks_from_layer": 1}},
    ],
    ids=str,
)
def test_a_deterministic_run_needs_nothing_that_cuda_refuses(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with DeterministicCuda():
                return method(*arguments, **keywords)

        return call

    for name in ("micro_step", "step", "evaluate"):
        monkeypatch.setattr(Engine, name, checked(getattr(Engine, name)))
    write_text(tmp_path)
    steps = {"training.steps": 2, "training.evaluate_every": 2, "engine.deterministic": True}
    assert pretrain(small_config(tmp_path, steps | changes)).step == 2
