"""Our BERT equals transformers' BertModel and DistilBertModel: hidden states and gradients, on random small shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

from megahead.config.model import ModelConfig
from megahead.hf.encoders import BERT, DISTILBERT
from megahead.hf.families import Family
from megahead.models.documents import Documents
from megahead.models.families import Bert, build_backbone


def shape(seed: int, token_types: int) -> ModelConfig:
    """A small shape that differs with the seed; the MLP is not always 4 x the width."""
    heads, head_size, layers = (3, 16, 2) if seed % 2 else (2, 24, 3)
    return ModelConfig(
        family="bert",
        num_layers=layers,
        hidden_size=heads * head_size,
        num_heads=heads,
        intermediate_size=100 if seed % 3 else None,
        vocab_size=61,
        vocab_multiple=1,
        max_positions=40 + seed,
        token_types=token_types,
        activation="gelu" if seed % 4 else "gelu_tanh",
        norm_eps=1e-12 if seed % 2 or not token_types else 1e-3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def theirs(config: ModelConfig) -> tuple[nn.Module, Family]:
    activation = "gelu" if config.activation == "gelu" else "gelu_pytorch_tanh"
    if config.token_types:
        model = BertModel(
            BertConfig(
                vocab_size=61,
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                intermediate_size=config.mlp_size(),
                hidden_act=activation,
                max_position_embeddings=config.max_positions,
                type_vocab_size=config.token_types,
                layer_norm_eps=config.norm_eps,
                attn_implementation="eager",
            ),
            add_pooling_layer=False,
        )
    else:
        model = DistilBertModel(
            DistilBertConfig(
                vocab_size=61,
                dim=config.hidden_size,
                n_layers=config.num_layers,
                n_heads=config.num_heads,
                hidden_dim=config.mlp_size(),
                activation=activation,
                max_position_embeddings=config.max_positions,
                attn_implementation="eager",
            )
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm.weight" in name.lower() else 0.0)
    return model.eval(), BERT if config.token_types else DISTILBERT


def ours_from(model: nn.Module, names: Family, config: ModelConfig) -> Bert:
    weights = {names.parameter_names(name)[0]: parameter for name, parameter in model.named_parameters()}
    backbone = build_backbone(config)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            parameter.copy_(weights.pop(f"backbone.{name}"))
    assert not weights
    assert isinstance(backbone, Bert)
    return backbone


@pytest.mark.parametrize("token_types", [0, 1, 2])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_hidden_states(token_types: int, seed: int) -> None:
    torch.manual_seed(seed)
    config = shape(seed, token_types)
    model, names = theirs(config)
    ids = torch.randint(0, 61, (3, 33))
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        torch.testing.assert_close(ours_from(model, names, config)(ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("token_types", [0, 2])
def test_documents_and_padding_of_a_row_equal_each_document_alone(token_types: int) -> None:
    torch.manual_seed(3)
    config = shape(3, token_types)
    model, names = theirs(config)
    documents = [torch.randint(0, 61, (1, length)) for length in (9, 1, 20)]
    padded = [*documents, torch.zeros(1, 7, dtype=torch.int64)]
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in padded])[None]
    with torch.no_grad():
        packed = ours_from(model, names, config)(torch.cat(padded, 1), Documents(positions))[:, :30]
        expected = torch.cat([model(ids).last_hidden_state for ids in documents], 1)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("token_types", [0, 2])
def test_gradients(token_types: int) -> None:
    torch.manual_seed(4)
    config = shape(5, token_types)
    model, names = theirs(config)
    backbone = ours_from(model, names, config)
    ids = torch.randint(1, 61, (2, 17))  # without their padding id, whose row has no gradient there
    weights = torch.randn(2, 17, config.hidden_size)
    (model(ids).last_hidden_state * weights).mean().backward()
    (backbone(ids) * weights).mean().backward()
    expected = {names.parameter_names(name)[0]: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in backbone.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[f"backbone.{name}"], rtol=1e-4, atol=1e-5, msg=name)
