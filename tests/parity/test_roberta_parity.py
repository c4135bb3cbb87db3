"""Our RoBERTa equals transformers' RobertaForMaskedLM and XLMRobertaForMaskedLM: hidden states, logits, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import RobertaConfig, RobertaForMaskedLM, XLMRobertaConfig, XLMRobertaForMaskedLM

from megahead.config.model import ModelConfig
from megahead.hf.encoders import ROBERTA, XLM_ROBERTA
from megahead.models.documents import Documents, TargetPositions
from megahead.models.families import Bert, build_backbone
from megahead.objectives.micro_batch import MaskHead

CLASSES = {"roberta": (RobertaForMaskedLM, RobertaConfig), "xlm_roberta": (XLMRobertaForMaskedLM, XLMRobertaConfig)}
FAMILIES = {"roberta": ROBERTA, "xlm_roberta": XLM_ROBERTA}
SHAPES: dict[str, dict[str, Any]] = {
    "padding at 1": {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3, "pad_token_id": 1},
    "padding at 0": {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0},
    "padding at 5": {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "pad_token_id": 5},
}
CASES = [(family, shape) for family in CLASSES for shape in SHAPES]


def pair(family: str, shape: str) -> tuple[Any, Bert, MaskHead]:
    """Random weights in theirs, and the same in ours: body, transform, and the bias of each token."""
    model_class, config_class = CLASSES[family]
    theirs = config_class(
        **{"vocab_size": 61, "intermediate_size": 100, "layer_norm_eps": 1e-3, "max_position_embeddings": 48},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 1},
        attn_implementation="eager",
        **SHAPES[shape],
    )
    model = model_class(theirs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if name.lower().endswith("norm.weight") else 0.0)
    config = ModelConfig(**FAMILIES[family].model_settings(theirs.to_dict()), vocab_multiple=1)
    assert (config.family, config.max_positions) == (family, 47 - SHAPES[shape]["pad_token_id"])
    backbone, head = build_backbone(config), MaskHead(config)
    weights = in_ours(family, model)
    with torch.no_grad():
        for prefix, module in (("backbone", backbone), ("mask_head", head)):
            for name, parameter in module.named_parameters():
                parameter.copy_(weights.pop(f"{prefix}.{name}"))
    assert not weights
    assert isinstance(backbone, Bert)
    return model.eval(), backbone, head


def in_ours(family: str, model: Any) -> dict[str, nn.Parameter]:
    """Their parameters by our names, each once: the head's matrix is the embedding, its two biases are one."""
    every = dict(model.named_parameters(remove_duplicate=False))
    del every["lm_head.decoder.weight"], every["lm_head.decoder.bias"]
    return {FAMILIES[family].parameter_names(name)[0]: parameter for name, parameter in every.items()}


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_hidden_states_and_logits(family: str, shape: str) -> None:
    torch.manual_seed(1)
    model, backbone, head = pair(family, shape)
    ids = torch.randint(6, 61, (2, 42))
    with torch.no_grad():
        hidden, logits = model.roberta(ids).last_hidden_state, model(ids).logits
        torch.testing.assert_close(backbone(ids), hidden, rtol=1e-4, atol=1e-4)
        scores = head(backbone(ids)) @ backbone.embedding.weight.T + head.bias
        torch.testing.assert_close(scores, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_packed_documents_equal_each_alone_that_is_padded(family: str, shape: str) -> None:
    """Theirs side by side, short ones padded, without a mask of positions; ours in one row, without any padding."""
    torch.manual_seed(3)
    model, backbone, _ = pair(family, shape)
    lengths, padding = (9, 1, 20), SHAPES[shape]["pad_token_id"]
    documents = [torch.randint(6, 61, (length,)) for length in lengths]
    padded = torch.stack([F.pad(ids, (0, 20 - len(ids)), value=padding) for ids in documents])
    mask = torch.arange(20) < torch.tensor(lengths)[:, None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = backbone(torch.cat(documents)[None], Documents(positions))[0]
        expected = model.roberta(padded, attention_mask=mask.long()).last_hidden_state[mask]
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_gradients_of_a_masked_loss(family: str, shape: str, few: bool) -> None:
    """Their whole last block, ours for the targets alone."""
    torch.manual_seed(4)
    model, backbone, head = pair(family, shape)
    ids, at = torch.randint(6, 61, (2, 17)), torch.tensor([0, 3, 8, 20, 33])
    labels = torch.full((34,), -100)
    labels[at] = torch.randint(0, 61, (5,))
    expected = model(ids, labels=labels.view(2, 17)).loss
    targets = TargetPositions(at, 2, 17, 3 if few else None)
    outputs = head(backbone.encode_at(backbone.embed(ids), Documents.whole_rows(2, 17), targets))
    loss = F.cross_entropy(outputs @ backbone.embedding.weight.T + head.bias, labels[at])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    expected.backward()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in in_ours(family, model).items()}
    for prefix, module in (("backbone", backbone), ("mask_head", head)):
        for name, parameter in module.named_parameters():
            wanted = gradients.pop(f"{prefix}.{name}")
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert not gradients
