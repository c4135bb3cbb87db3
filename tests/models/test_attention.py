"""What a decoder's attention layer promises beside its formula."""

from __future__ import annotations

import pytest
import torch

from megahead.config.model import ModelConfig
from megahead.models.blocks import SelfAttention
from megahead.models.documents import Documents
from megahead.models.layers import rotary_tables
from support.exact_attention import POSITIONS

CONFIG = ModelConfig(num_layers=1, hidden_size=24, num_heads=3, vocab_size=8, attention_dropout=0.5)


@pytest.mark.parametrize("documents", [Documents.whole_rows(2, 7), Documents(POSITIONS)])
def test_dropout_acts_in_training_only(documents):
    layer = SelfAttention(CONFIG)
    x_BTD, rotation = torch.randn(2, 7, 24), rotary_tables(documents.positions_BT, 4, 10000.0)
    assert not torch.equal(layer(x_BTD, rotation, documents), layer(x_BTD, rotation, documents))
    layer.eval()
    assert torch.equal(layer(x_BTD, rotation, documents), layer(x_BTD, rotation, documents))


def test_a_run_of_heads_alone_computes_its_part():
    """What sharding relies on: rows of qkv head by head, columns of output likewise."""
    torch.manual_seed(0)
    whole = SelfAttention(CONFIG).eval()
    part = SelfAttention(CONFIG).eval()
    part.qkv.weight = torch.nn.Parameter(whole.qkv.weight[24:72])
    part.qkv.bias = torch.nn.Parameter(whole.qkv.bias[24:72])
    part.output.weight = torch.nn.Parameter(whole.output.weight[:, 8:24])
    silenced = SelfAttention(CONFIG).eval()
    silenced.load_state_dict(whole.state_dict())
    with torch.no_grad():
        silenced.output.weight[:, :8] = 0
        part.output.bias.copy_(whole.output.bias)
    documents = Documents.whole_rows(2, 7)
    x_BTD, rotation = torch.randn(2, 7, 24), rotary_tables(documents.positions_BT, 4, 10000.0)
    torch.testing.assert_close(part(x_BTD, rotation, documents), silenced(x_BTD, rotation, documents))
