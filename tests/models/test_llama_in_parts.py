"""A Llama, GPT-2 or Gemma over a tensor group is the whole one, also with fewer key heads or a part of the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import FullTensors
from megahead.errors import ConfigErrors
from megahead.estimate import rank_parameters
from megahead.models.backbone import Backbone
from megahead.models.documents import Documents
from megahead.models.families import SHARDING, build_backbone
from megahead.models.parallel import parallelize_, shard_dims
from megahead.objectives.pretraining import build_parallel_model, load_weights_
from support.long import long
from support.on_ranks import on_ranks
from support.small_checkpoint import small_config

IDS = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(2))
DOCUMENTS = Documents(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]]))
SHAPE = {"family": "llama", "hidden_size": 32, "num_heads": 4, "vocab_multiple": 64}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_heads": 2, "head_dim": 12, "qk_norm": True},
    "one key head": {"num_key_heads": 1, "attention_bias": "qkv"},
    "all biases": {"num_key_heads": 2, "attention_bias": "all", "mlp_bias": True},
    "gpt2": {"family": "gpt2", "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gemma3": {"family": "gemma3", "num_key_heads": 2, "head_dim": 12, "local_window": 2, "global_every": 2},
}


def whole_backbone(config: RunConfig) -> Backbone:
    torch.manual_seed(1)
    backbone = build_backbone(config.model).double()
    for parameter in backbone.parameters():
        parameter.data.normal_(std=0.3)
    return backbone


def in_parts(group: Group, config: RunConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and whole gradients."""
    whole = whole_backbone(config)
    backbone = build_backbone(config.model).double()
    parallelize_(backbone, SHARDING[config.model.family], group, sequence=config.parallel.sequence)
    load_weights_(backbone, group, FullTensors(whole.get_parameter))
    hidden = backbone(IDS, DOCUMENTS)
    hidden.cos().sum().backward()
    dims = shard_dims(backbone)
    grads = {}
    for name, p in backbone.named_parameters():
        assert p.grad is not None, name
        grads[name] = p.grad if name not in dims else group.unshard(p.grad, dims[name])
    return hidden.detach(), grads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [1, 2, long(4)])
def test_hidden_states_and_gradients_are_those_of_one_rank(size: int, sequence: bool, kind: str) -> None:
    config = small_config(model=SHAPE | KINDS[kind], parallel={"tensor": size, "sequence": sequence})
    whole = whole_backbone(config)
    hidden = whole(IDS, DOCUMENTS)
    hidden.cos().sum().backward()
    for its_hidden, grads in on_ranks(size, in_parts, config):
        torch.testing.assert_close(its_hidden, hidden.detach(), rtol=0, atol=1e-10)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(
                grads[name], parameter.grad, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


def parameters(group: Group, config: RunConfig) -> int:
    return sum(parameter.numel() for parameter in build_parallel_model(config, group, torch.device("cpu")).parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, long(4)])
def test_a_rank_holds_as_many_numbers_as_estimated(size: int, kind: str) -> None:
    config = small_config(model=SHAPE | KINDS[kind], parallel={"tensor": size})
    assert on_ranks(size, parameters, config)[0] == rank_parameters(config)


def test_key_heads_that_do_not_split_evenly_are_refused() -> None:
    sentence = r"`parallel\.tensor` must divide the model's num_key_heads \(3\), or be a multiple of it, but is 2"
    with pytest.raises(ConfigErrors, match=sentence):
        small_config(model=SHAPE | {"hidden_size": 36, "num_heads": 6, "num_key_heads": 3}, parallel={"tensor": 2})
