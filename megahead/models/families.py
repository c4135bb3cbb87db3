"""The backbone families: their classes, their sharding over ranks, and their initial weights.

B rows, T tokens per row, t of them on this rank, D hidden size, N targets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.model import ROBERTAS, ModelConfig
from megahead.distributed.group import scatter_to_group
from megahead.distributed.tensors import block_ranges
from megahead.models.backbone import Backbone, PreNormBackbone
from megahead.models.blocks import Block, PostNormBlock
from megahead.models.documents import Documents, TargetPositions
from megahead.models.layers import Embedding, Rotation, build_norm, dropout
from megahead.models.parallel import HEAD_SHARDING, TOKEN_SHARDING, WEIGHT_SHARDING

# Decoders.


class GPTNeoX(PreNormBackbone):
    """GPT-NeoX (Black et al. 2022, arXiv 2204.06745), the decoder of the Pythia suite, without its head: layer norms,
    rotary positions on a part of each head, attention and MLP in parallel."""


class Llama(PreNormBackbone):
    """Llama (Touvron et al. 2023, arXiv 2302.13971) without head; with other settings Qwen 2 and 3 and Mistral:
    RMS norms, rotary positions, grouped-query attention, then a gated MLP."""


class GPT2(PreNormBackbone):
    """GPT-2 (Radford et al. 2019) without its head: the sum of token and position embeddings, pre-norm blocks with
    layer norms and biases, a final norm. Positions begin at 0 with each document."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.positions = Embedding(config.max_positions, config.hidden_size)

    def initial_hidden(self, inputs_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the sum of token and position embeddings."""
        x_BTD = inputs_BTD + self.positions(documents.positions_BT)
        x_BtD = scatter_to_group(x_BTD, self.sequence_group, dim=1)
        return dropout(x_BtD, self.dropout, self.sequence_group, self.training)

    def block_arguments(self, documents: Documents) -> Sequence[tuple[None, Documents]]:
        """The same arguments for each block, without a rotation."""
        return [(None, documents)] * len(self.blocks)


class SandwichBlock(Block):
    """A block with norms before and after each sublayer: `y = x + norm'(attention(norm x))`, then the same with the MLP
    and norms of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.attention_output_norm = build_norm(config)
        self.mlp_output_norm = build_norm(config)

    def forward(
        self, x_BTD: Tensor, rotation: Rotation | None, documents: Documents, targets: TargetPositions | None = None
    ) -> Tensor:
        """[B, T, D], or [N, D] with `targets`: as `Block`."""
        attended = self.attention(self.attention_norm(x_BTD), rotation, documents, targets)
        x = x_BTD if targets is None else targets.select(x_BTD)
        x = x + self._dropout(self.attention_output_norm(attended))
        return x + self._dropout(self.mlp_output_norm(self.mlp(self.mlp_norm(x))))


class Gemma3(PreNormBackbone):
    """The text model of Gemma 3 (Gemma Team 2025, arXiv 2503.19786) without its head.

    Token embeddings times sqrt(D), sandwich blocks with RMS norms (whose weights are around 0), norms of queries and
    keys, GeGLU, rotary positions. Every sixth layer is global; the others are local: a token attends to a window that
    ends with it, with rotary positions of a smaller base. Outputs are scored against embeddings that are not scaled.
    """

    def build_block(self, config: ModelConfig, layer: int) -> nn.Module:
        """A sandwich block."""
        return SandwichBlock(config)

    def initial_hidden(self, inputs_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the scaled token embeddings. The scale is rounded to their dtype, as in the published model."""
        scale = torch.tensor(math.sqrt(inputs_BTD.shape[-1]), dtype=inputs_BTD.dtype)
        return super().initial_hidden(inputs_BTD * scale, documents)


# Encoders. Rows are packed, so that there is little padding; the padding of a row is a document of its own.


class Bert(Backbone):
    """BERT (Devlin et al. 2019, arXiv 1810.04805), without pooler and head; without token types it is DistilBERT, with
    a position offset RoBERTa (Liu et al. 2019, arXiv 1907.11692) and XLM-R (Conneau et al. 2020, arXiv 1911.02116).

    The normed sum of token, position and type embeddings, then post-norm blocks. All tokens have the first type.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.dropout = config.hidden_dropout
        self.embedding = Embedding(config.padded_vocab_size(), hidden_size)
        self.position_offset = config.position_offset
        self.positions = Embedding(config.position_rows(), hidden_size)
        self.token_types = Embedding(config.token_types, hidden_size) if config.token_types else None
        self.embedding_norm = build_norm(config)
        self.blocks = nn.ModuleList(PostNormBlock(config) for _ in range(config.num_layers))

    def initial_hidden(self, inputs_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, T, D]: the normed sum of embeddings."""
        x_BTD = inputs_BTD + self.positions(documents.positions_BT + self.position_offset)
        if self.token_types is not None:
            x_BTD = x_BTD + self.token_types(torch.zeros((), dtype=torch.int64, device=inputs_BTD.device))
        return F.dropout(self.embedding_norm(x_BTD), self.dropout, self.training)

    def block_arguments(self, documents: Documents) -> Sequence[tuple[Documents]]:
        """The same arguments for each block."""
        return [(documents,)] * len(self.blocks)


class ModernBert(PreNormBackbone):
    """ModernBERT (Warner et al. 2024, arXiv 2412.13663), for long documents, without its head.

    Normed embeddings, pre-norm blocks, a final norm; rotary positions, GeGLU, no biases. Every third layer is global:
    its tokens attend to their whole document. The others are local: a sliding window, and rotary positions of a smaller
    base. The first block has no attention norm, since its input is normed.
    """

    has_embedding_norm = True
    has_target_only_last_block = True

    def initial_hidden(self, inputs_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the normed token embeddings, without positions."""
        x_BtD = self.embedding_norm(scatter_to_group(inputs_BTD, self.sequence_group, dim=1))
        return dropout(x_BtD, self.dropout, self.sequence_group, self.training)


_BACKBONES: dict[str, Callable[[ModelConfig], Backbone]] = {
    "gpt_neox": GPTNeoX,
    "llama": Llama,
    "gpt2": GPT2,
    "gemma3": Gemma3,
    "bert": Bert,
    **dict.fromkeys(ROBERTAS, Bert),
    "modernbert": ModernBert,
}

_GATE_SHARDING = {"blocks.*.mlp.gate": "column"}
_LLAMA_SHARDING = WEIGHT_SHARDING | HEAD_SHARDING | TOKEN_SHARDING | _GATE_SHARDING
_LLAMA_SHARDING |= dict.fromkeys(("blocks.*.attention.query_norm", "blocks.*.attention.key_norm"), "head_norm")

SHARDING: dict[str, dict[str, str]] = {
    "gpt_neox": WEIGHT_SHARDING | TOKEN_SHARDING | {"blocks.*.attention.qkv": "column"},  # whole heads
    "llama": _LLAMA_SHARDING,
    "gpt2": WEIGHT_SHARDING | HEAD_SHARDING | TOKEN_SHARDING,
    "gemma3": _LLAMA_SHARDING | dict.fromkeys(("blocks.*.attention_output_norm", "blocks.*.mlp_output_norm"), "norm"),
    **dict.fromkeys(("bert", *ROBERTAS), WEIGHT_SHARDING | HEAD_SHARDING),  # positions and types are small: replicated
    "modernbert": WEIGHT_SHARDING | HEAD_SHARDING | TOKEN_SHARDING | {"embedding_norm": "norm"} | _GATE_SHARDING,
}
"""Per family: pattern of module names (`*` matches a layer's number) -> parallel style.

Of the common tables, WEIGHT_SHARDING splits embedding, MLP and attention output, HEAD_SHARDING the projections to
queries, keys and values by attention heads, and TOKEN_SHARDING, used under sequence parallelism only, the tokens.
"""


def build_backbone(config: ModelConfig) -> Backbone:
    """The backbone of `config` on torch's default device, with uninitialized weights."""
    return _BACKBONES[config.family](config)


# Random initial weights depend only on the seed and the parameter's name: they are equal on all meshes and devices.
#
# Pythia: normal weights with std sqrt(2 / (5 D)) ("small init", Nguyen & Salazar 2019, arXiv 1910.05895), and 2 / (L
# sqrt(D)) for a sublayer's output projection (GPT-J's "wang init"); biases 0, norms 1. Megatron (Shoeybi et al. 2019,
# arXiv 1909.08053): one std, divided by sqrt(2 L) for these projections. L layers.


_RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight")
_RANDN_MULTIPLE = 16  # torch.randn generates the last 16 elements differently if the count is no multiple of 16


def initial_value(name: str, shape: Sequence[int], seed: int, config: ModelConfig) -> Tensor:
    """The initial value of the full parameter `name`, an fp32 CPU tensor.

    The first rows of a longer matrix are the same: padding the vocabulary changes no token's weights.
    """
    return next(initial_blocks(name, shape, seed, config, [range(shape[0])]))


def initial_blocks(
    name: str, shape: Sequence[int], seed: int, config: ModelConfig, blocks: Iterable[range] | None = None
) -> Iterator[Tensor]:
    """The value of `initial_value`, bit for bit, in consecutive blocks of rows (by default at most 16,384), generated
    on iteration."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    for rows in block_ranges(shape[0]) if blocks is None else blocks:
        size = (len(rows), *shape[1:])
        if name.endswith("norm.weight"):
            yield torch.zeros(size) if config.has_zero_centered_norms() else torch.ones(size)
        elif name.endswith(".bias"):
            yield torch.zeros(size)
        else:
            count = math.prod(size)
            values = torch.randn(-(-count // _RANDN_MULTIPLE) * _RANDN_MULTIPLE, generator=generator)
            yield values[:count].view(size).mul_(_init_std(name, config))


def _init_std(name: str, config: ModelConfig) -> float:
    if name.endswith("embedding.weight") and config.init_embedding_std is not None:
        return config.init_embedding_std
    if config.init == "normal":
        return config.init_std
    if config.init == "megatron":
        return config.init_std / (math.sqrt(2 * config.num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else 1)
    if name.endswith(_RESIDUAL_OUTPUTS):
        return 2 / (config.num_layers * math.sqrt(config.hidden_size))
    return math.sqrt(2 / (5 * config.hidden_size))
