"""Sequence parallelism: a backbone whose tokens are split over ranks is the whole one, in less memory per rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megahead.config.model import ModelConfig
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.config.training import ParallelConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import FullTensors
from megahead.errors import ConfigError, ConfigErrors
from megahead.estimate import rank_memory
from megahead.models.backbone import Backbone
from megahead.models.blocks import Recompute
from megahead.models.documents import Documents
from megahead.models.families import SHARDING, build_backbone
from megahead.models.parallel import parallelize_, shard_dims
from megahead.objectives.pretraining import load_weights_
from support.initialized import initialized
from support.long import long
from support.on_ranks import on_ranks
from support.small_checkpoint import small_config

CPU = torch.device("cpu")
LLAMA = {"family": "llama", "qk_norm": True}
IDS = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(2))
DOCUMENTS = Documents(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]]))


def whole_backbone(config: RunConfig) -> Backbone:
    torch.manual_seed(1)
    backbone = build_backbone(config.model).double()
    for parameter in backbone.parameters():
        parameter.data.normal_(std=0.3)
    return backbone


def in_parts(group: Group, config: RunConfig, recompute: Recompute) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and whole gradients."""
    whole = whole_backbone(config)
    backbone = build_backbone(config.model).double()
    parallelize_(backbone, SHARDING["gpt_neox"], group, sequence=True)
    load_weights_(backbone, group, FullTensors(whole.get_parameter))
    backbone.recompute_blocks = recompute
    hidden = backbone(IDS, DOCUMENTS)
    hidden.cos().sum().backward()
    dims = shard_dims(backbone)
    grads = {}
    for name, p in backbone.named_parameters():
        assert p.grad is not None, name
        grads[name] = p.grad if name not in dims else group.unshard(p.grad, dims[name])
    return hidden.detach(), grads


@pytest.mark.parametrize("residual", ["parallel", "sequential"])
@pytest.mark.parametrize("recompute", [False, True, "selective"])
@pytest.mark.parametrize("size", [1, 2, long(4)])
def test_hidden_states_and_gradients_are_those_of_one_rank(size: int, recompute: Recompute, residual: str) -> None:
    model = {"hidden_size": 32, "num_heads": 4, "parallel_residual": residual == "parallel"}
    config = small_config(model=model, parallel={"tensor": size, "sequence": True})
    whole = whole_backbone(config)
    hidden = whole(IDS, DOCUMENTS)
    hidden.cos().sum().backward()
    for its_hidden, grads in on_ranks(size, in_parts, config, recompute):
        torch.testing.assert_close(its_hidden, hidden.detach(), rtol=0, atol=1e-10)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(
                grads[name], parameter.grad, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


def dropped(group: Group, config: RunConfig, recompute: bool) -> list[Tensor]:
    """Where the first block's sublayers were dropped, hidden states, and two gradients of norms."""
    module = initialized(config, group)
    module.backbone.recompute_blocks = recompute
    added: list[Tensor] = []
    norm = module.backbone.get_submodule("blocks.1.attention_norm")
    norm.register_forward_pre_hook(lambda _, inputs: added.append(inputs[0].detach()))
    torch.manual_seed(9)
    hidden: Tensor = module.backbone(torch.zeros(4, 8, dtype=torch.int64))
    hidden.square().sum().backward()
    norms = [module.backbone.get_submodule(name) for name in ("final_norm", "blocks.0.attention_norm")]
    return [added[0] == added[0][0, 0], hidden.detach(), *(norm.weight.grad for norm in norms)]


def test_dropout_of_the_residual_stream_is_apart_where_tokens_are_and_recomputed_alike() -> None:
    """All tokens are equal, hence all values: what differs between them is what was dropped."""
    model = {"hidden_size": 32, "num_heads": 4, "hidden_dropout": 0.4, "attention_dropout": 0.3}
    config = small_config(model=model, parallel={"tensor": 2, "sequence": True})
    mine, theirs = on_ranks(2, dropped, config, False)
    assert not torch.equal(mine[0], theirs[0])
    for alike in (1, 2, 3):
        assert torch.equal(mine[alike], theirs[alike])
    for kept, recomputed in zip(mine, on_ranks(2, dropped, config, True)[0], strict=True):
        torch.testing.assert_close(kept, recomputed)


def kept_bytes(group: Group, config: RunConfig) -> int:
    """What the blocks keep for the backward pass, weights apart."""
    backbone = initialized(config, group).backbone
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = backbone(torch.zeros(2, 32, dtype=torch.int64))
    weights = {p.untyped_storage().data_ptr() for p in backbone.parameters()}
    assert hidden.requires_grad
    return sum(size for place, size in kept.items() if place not in weights)


def kept_by_norms(config: RunConfig) -> float:
    """Bytes of normed values before their weight, which RMS norms keep on a CPU alone."""
    model, mesh = config.model, config.parallel
    tokens = config.batch.micro_size * config.data.sequence_length
    of_heads = 2 * model.hidden_size / mesh.tensor
    of_stream = 2 * model.hidden_size / (mesh.tensor if mesh.sequence else 1)
    return 4 * tokens * model.num_layers * (of_heads + of_stream)


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt_neox", "llama"])
def test_a_rank_keeps_its_share_of_all_activations_as_estimated(family: dict[str, Any]) -> None:
    """Tensor parallelism alone leaves each rank every block's inputs."""
    model = {"num_layers": 6, "hidden_size": 64, "num_heads": 4, **family}
    kept = []
    for mesh in ({}, {"tensor": 4}, {"tensor": 4, "sequence": True}):
        config = small_config(model=model, parallel=mesh, batch={"global_size": 2, "micro_size": 2})
        ranks = config.parallel.tensor
        kept.append(on_ranks(ranks, kept_bytes, config)[0])
        estimated = rank_memory(RunPlan.of(config, ranks)).activations + (kept_by_norms(config) if family else 0)
        assert kept[-1] == pytest.approx(estimated, rel=0.05 if family else 0.1)
    one, tensor, sequence = kept
    assert sequence < 0.27 * one < 0.35 * one < tensor


def autocast(group: Group, config: RunConfig) -> tuple[Tensor, Tensor]:
    module = initialized(config, group)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = module.backbone(IDS)
    hidden.float().square().sum().backward()
    grad = module.backbone.get_parameter("blocks.0.mlp.up.weight").grad
    assert grad is not None
    return hidden.detach(), grad if group.size == 1 else group.unshard(grad, 0)


def test_autocast_computes_in_half_precision_as_on_one_rank() -> None:
    model = {"hidden_size": 32, "num_heads": 4}
    ((expected, expected_grad),) = on_ranks(1, autocast, small_config(model=model))
    config = small_config(model=model, parallel={"tensor": 2, "sequence": True})
    for hidden, grad in on_ranks(2, autocast, config):
        assert hidden.dtype == expected.dtype
        torch.testing.assert_close(hidden, expected, rtol=0, atol=0.05)
        assert 0 < float((grad - expected_grad).norm() / expected_grad.norm()) < 0.02


def test_rows_that_do_not_split_evenly_are_refused() -> None:
    sentence = (
        r"`data\.sequence_length` must be a multiple of parallel\.tensor \(4\) under parallel\.sequence, but is 30"
    )
    model = {"hidden_size": 32, "num_heads": 4}
    with pytest.raises(ConfigErrors, match=sentence):
        small_config(model=model, parallel={"tensor": 4, "sequence": True}, data={"sequence_length": 30})


def test_a_model_that_does_not_say_where_tokens_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`parallel\.sequence` must be false for a Linear"):
        parallelize_(nn.Linear(2, 2), {"": "column"}, Group(), sequence=True)


@pytest.mark.parametrize("family", SHARDING)
def test_a_config_refuses_families_that_split_no_tokens(family: Any) -> None:
    model = ModelConfig(family=family, num_layers=1, hidden_size=32, num_heads=4, vocab_size=64)
    is_refused = "tokens" not in SHARDING[family].values()
    with pytest.raises(ConfigError, match=f"must be false for .*{family}") if is_refused else nullcontext():
        ParallelConfig(tensor=2, sequence=True).check(model, sequence_length=32)
