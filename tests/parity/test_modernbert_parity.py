"""Our ModernBERT equals transformers': hidden states, logits and gradients; local layers see no further than theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ModernBertConfig, ModernBertForMaskedLM

from megahead.config.model import ModelConfig
from megahead.hf.encoders import MODERNBERT, modernbert_settings
from megahead.models.documents import Documents, TargetPositions
from megahead.models.families import ModernBert, build_backbone
from megahead.objectives.micro_batch import MaskHead

SHAPES: dict[str, dict[str, Any]] = {
    "local and global": {"num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 3, "local_attention": 8},
    "ending locally": {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "local_attention": 14},
    "one layer in two": {
        **{"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "local_attention": 2},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "classifier_activation": "gelu_pytorch_tanh",
    },
    "global alone": {
        **{"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "local_attention": 4},
        "layer_types": ["full_attention"] * 2,
        "classifier_bias": True,
    },
}
BASES = {"full_attention": 5000.0, "sliding_attention": 70.0}


def pair(shape: str) -> tuple[ModernBertForMaskedLM, ModernBert, MaskHead, Tensor]:
    """Random weights in theirs, and the same in ours: body, transform, and the bias of each token."""
    theirs = ModernBertConfig(
        vocab_size=61,
        intermediate_size=100,
        norm_eps=1e-3,
        pad_token_id=0,
        max_position_embeddings=64,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in BASES.items()},
        attn_implementation="eager",
        **SHAPES[shape],
    )
    model = ModernBertForMaskedLM(theirs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm.weight" in name else 0.0)
    config = ModelConfig(**modernbert_settings(theirs.to_dict()), vocab_multiple=1)
    backbone, head = build_backbone(config), MaskHead(config)
    weights = in_ours(dict(model.named_parameters()))
    with torch.no_grad():
        for prefix, module in (("backbone", backbone), ("mask_head", head)):
            for name, parameter in module.named_parameters():
                parameter.copy_(weights.pop(f"{prefix}.{name}"))
    assert not weights
    assert isinstance(backbone, ModernBert)
    return model.eval(), backbone, head, head.bias


def in_ours(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """By our names, each the part that is its own."""
    found = {}
    for name, tensor in stored.items():
        ours = MODERNBERT.parameter_names(name)
        found.update(zip(ours, tensor.chunk(len(ours)), strict=True))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_and_logits(shape: str) -> None:
    torch.manual_seed(1)
    model, backbone, head, bias = pair(shape)
    ids = torch.randint(0, 61, (2, 50))
    with torch.no_grad():
        hidden, logits = model.model(ids).last_hidden_state, model(ids).logits
        torch.testing.assert_close(backbone(ids), hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            head(backbone(ids)) @ backbone.embedding.weight.T + bias, logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_documents_equal_each_alone_whose_padding_is_masked(shape: str) -> None:
    """Theirs side by side, short ones padded; ours in one row, without any padding."""
    torch.manual_seed(3)
    model, backbone, _, _ = pair(shape)
    lengths = (9, 1, 20)
    documents = [torch.randint(0, 61, (length,)) for length in lengths]
    padded = torch.stack([F.pad(ids, (0, 20 - len(ids))) for ids in documents])
    mask = torch.arange(20) < torch.tensor(lengths)[:, None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = backbone(torch.cat(documents)[None], Documents(positions))[0]
        torch.testing.assert_close(
            packed, model.model(padded, attention_mask=mask.long()).last_hidden_state[mask], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_a_masked_loss(shape: str, few: bool) -> None:
    """Their whole last block, ours for the targets alone."""
    torch.manual_seed(4)
    model, backbone, head, bias = pair(shape)
    ids, at = torch.randint(1, 61, (2, 17)), torch.tensor([0, 3, 8, 20, 33])
    labels = torch.full((34,), -100)
    labels[at] = torch.randint(0, 61, (5,))
    expected = model(ids, labels=labels.view(2, 17)).loss
    targets = TargetPositions(at, 2, 17, 3 if few else None)
    outputs = head(backbone.encode_at(backbone.embed(ids), Documents.whole_rows(2, 17), targets))
    loss = F.cross_entropy(outputs @ backbone.embedding.weight.T + bias, labels[at])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    expected.backward()
    loss.backward()
    gradients = in_ours({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for prefix, module in (("backbone", backbone), ("mask_head", head)):
        for name, parameter in module.named_parameters():
            wanted = gradients.pop(f"{prefix}.{name}")
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert not gradients
