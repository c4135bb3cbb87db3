"""What a vanilla objective trains beside the backbone: an output matrix, a bias, and for an encoder a transform.

V padded vocabulary, D features, N targets.

A headless objective (contrastive weight tying: the softmax runs over the embeddings of the batch's targets) has
neither.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config import ModelConfig
from megahead.nn import LayerNorm


class OutputEmbedding(nn.Module):
    """The matrix of an untied vanilla head, [V, D]: a parameter only."""

    def __init__(self, padded_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(padded_vocab_size, hidden_size))


class OutputBias(nn.Module):
    """What is added to each token's score, [V]: a parameter only."""

    def __init__(self, padded_vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(padded_vocab_size))


class MaskHead(nn.Module):
    """What an encoder does to an output before it is multiplied by the output matrix, and the bias of each token.

    scores = norm(gelu(dense h)) . e_v + bias_v. A headless encoder has neither.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, config.transform_bias)
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.has_norm_bias())
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size()))

    def forward(self, outputs_ND: Tensor) -> Tensor:
        """[N, D]: the transformed outputs; the caller adds the bias to the scores."""
        transformed_ND: Tensor = self.norm(F.gelu(self.dense(outputs_ND), approximate=self.approximate))
        return transformed_ND
