"""Initial weights: Pythia's spreads, keyed by seed and name, untouched by padding."""

from __future__ import annotations

import math

import pytest
import torch

from megahead.config.model import ModelConfig
from megahead.distributed import tensors as blocks
from megahead.models.families import build_backbone, initial_blocks, initial_value
from support.initialized import initialize_, initialized_backbone

CONFIG = ModelConfig(num_layers=3, hidden_size=64, num_heads=2, vocab_size=500, vocab_multiple=128)


def initialised(config: ModelConfig = CONFIG, seed: int = 1) -> dict[str, torch.Tensor]:
    backbone = initialized_backbone(config, seed)
    return {name: parameter.detach() for name, parameter in backbone.named_parameters()}


def test_pythia_spreads():
    small, wang = math.sqrt(2 / (5 * 64)), 2 / (3 * math.sqrt(64))
    for name, values in initialised().items():
        if name.endswith("norm.weight"):
            assert torch.equal(values, torch.ones_like(values))
        elif name.endswith("bias"):
            assert not values.any()
        else:
            to_residual = "attention.output" in name or "mlp.down" in name
            assert values.std().item() == pytest.approx(wang if to_residual else small, rel=0.05)
            assert abs(values.mean().item()) < 0.01


def test_normal_spread_is_the_same_everywhere():
    config = CONFIG.model_copy(update={"init": "normal", "init_std": 0.5})
    matrices = [values for values in initialised(config).values() if values.ndim == 2]
    assert [values.std().item() for values in matrices] == pytest.approx([0.5] * len(matrices), rel=0.05)


def test_the_embedding_may_have_a_spread_of_its_own():
    config = CONFIG.model_copy(update={"init_embedding_std": 0.5})
    plain, own = initialised(), initialised(config)
    assert own.pop("embedding.weight").std().item() == pytest.approx(0.5, rel=0.05)
    assert all(torch.equal(values, plain[name]) for name, values in own.items())


def test_seed_and_name_decide():
    first, again, other = initialised(seed=1), initialised(seed=1), initialised(seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])


def test_values_never_change_between_versions():
    """A run's first step must be repeatable for as long as its config is."""
    value = initial_value("embedding.weight", (2, 3), 1, CONFIG)
    torch.testing.assert_close(
        value,
        torch.tensor([[-0.0985512, 0.0772485, 0.083278], [0.0477111, 0.0715419, 0.0246677]]),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("hidden", [2, 7, 64])
def test_padding_of_the_vocabulary_leaves_tokens_alone(hidden):
    few = initial_value("embedding.weight", (5, hidden), 3, CONFIG)
    for rows in (6, 8, 9, 1024):
        assert torch.equal(initial_value("embedding.weight", (rows, hidden), 3, CONFIG)[:5], few)


def test_a_head_around_the_backbone_is_drawn_like_the_embedding():
    module = torch.nn.Module()
    module.backbone = build_backbone(CONFIG)
    module.head = torch.nn.Linear(64, CONFIG.padded_vocab_size(), bias=False)
    initialize_(module, 1, CONFIG)
    head, embedding = module.head.weight, module.backbone.embedding.weight
    assert head.std().item() == pytest.approx(embedding.std().item(), rel=0.02)
    assert not torch.equal(head, embedding)
    assert torch.equal(module.backbone.final_norm.weight, torch.ones(64))


@pytest.mark.parametrize("shape", [(5, 3), (33, 1), (64, 7), (100, 5), (16, 16)], ids=str)
@pytest.mark.parametrize("name", ["embedding.weight", "final_norm.weight", "final_norm.bias"])
def test_blocks_are_the_same_draws(monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int]) -> None:
    whole = initial_value(name, shape, 3, CONFIG)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 16)
    drawn = list(initial_blocks(name, shape, 3, CONFIG))
    assert len(drawn) == -(-shape[0] // 16)
    assert torch.equal(torch.cat(drawn), whole)
