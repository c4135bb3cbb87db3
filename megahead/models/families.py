"""The families of backbones: GPT-NeoX, Llama, BERT, ModernBERT; how each splits over ranks, and its initial weights.

B rows, T tokens a row, t those of them that this rank holds, D hidden size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.model import ModelConfig
from megahead.distributed.group import scatter_to_group
from megahead.distributed.tensors import block_ranges
from megahead.models.backbone import Backbone, Decoder
from megahead.models.blocks import Block, Heads, PostNormBlock, SelfAttention
from megahead.models.documents import Documents
from megahead.models.layers import MLP, Embedding, GatedMLP, LayerNorm, RMSNorm, Rotation, dropout, rotary_at
from megahead.models.parallel import SPLIT_HEADS, SPLIT_TOKENS, SPLIT_WEIGHTS

# What blocks are made of. Settings of other families are fixed (`FAMILY_FIXED` in megahead/config/model.py).


def _attention(config: ModelConfig) -> SelfAttention:
    heads = Heads(
        queries=config.num_heads,
        keys=config.key_heads(),
        size=config.head_size(),
        bias=config.attention_bias != "none",
        output_bias=config.attention_bias == "all",
        norm_eps=config.norm_eps if config.qk_norm else None,
        joint=config.family == "gpt_neox",
    )
    return SelfAttention(config.hidden_size, heads, causal=config.is_causal, dropout=config.attention_dropout)


def _mlp(config: ModelConfig) -> MLP | GatedMLP:
    sizes = config.hidden_size, config.mlp_size(), config.activation
    return GatedMLP(*sizes, bias=config.mlp_bias) if config.has_gated_mlp() else MLP(*sizes)


def _block(config: ModelConfig, norm: Callable[[], nn.Module], *, reads_normed: bool = False) -> Block:
    """`reads_normed`: its input was normed before, and is not again."""
    return Block(
        nn.Identity() if reads_normed else norm(),
        _attention(config),
        norm(),
        _mlp(config),
        parallel=config.parallel_residual,
        dropout=config.hidden_dropout,
    )


# Decoders.


class GPTNeoX(Decoder):
    """GPT-NeoX (Black et al. 2022, arXiv 2204.06745), the decoder of the Pythia suite, without its head: layer norms,
    rotary positions on a part of each head, attention and MLP side by side."""

    def __init__(self, config: ModelConfig) -> None:
        norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps)
        super().__init__(config, partial(_block, config, norm), norm)


class Llama(Decoder):
    """Llama (Touvron et al. 2023, arXiv 2302.13971), without its head; Qwen 2 and 3 and Mistral are settings of it: RMS
    norms, rotary positions, a gated MLP after attention, whose keys and values may have fewer heads."""

    def __init__(self, config: ModelConfig) -> None:
        norm = partial(RMSNorm, config.hidden_size, eps=config.norm_eps)
        super().__init__(config, partial(_block, config, norm), norm)


# Encoders. Rows are full of packed text, so nothing is computed for padding; where a row is not full, what is left is a
# document of its own, which no other sees.


class Bert(Backbone):
    """BERT (Devlin et al. 2019, arXiv 1810.04805), without pooler and head; DistilBERT is it without types.

    Tokens, positions and types summed and normed, then post-norm blocks. All tokens have the first type.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.dropout = config.hidden_dropout
        self.embedding = Embedding(config.padded_vocab_size(), hidden_size)
        self.positions = Embedding(config.max_positions, hidden_size)
        self.token_types = Embedding(config.token_types, hidden_size) if config.token_types else None
        self.embedding_norm = LayerNorm(hidden_size, eps=config.norm_eps)
        self.blocks = nn.ModuleList(_post_norm_block(config) for _ in range(config.num_layers))

    def embedded(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, T, D]: the normed sum."""
        x_BTD = rows_BTD + self.positions(documents.positions_BT)
        if self.token_types is not None:
            x_BTD = x_BTD + self.token_types(torch.zeros((), dtype=torch.int64, device=rows_BTD.device))
        return F.dropout(self.embedding_norm(x_BTD), self.dropout, self.training)

    def block_inputs(self, documents: Documents) -> Sequence[tuple[Documents]]:
        """The same for each block."""
        return [(documents,)] * len(self.blocks)


def _post_norm_block(config: ModelConfig) -> PostNormBlock:
    sizes = config.hidden_size, config.mlp_size(), config.activation
    rates = {"norm_eps": config.norm_eps, "dropout": config.hidden_dropout}
    return PostNormBlock(config.hidden_size, _attention(config), MLP(*sizes), **rates)


class ModernBert(Backbone):
    """ModernBERT (Warner et al. 2024, arXiv 2412.13663), for long documents, without its head.

    Normed embeddings, pre-norm blocks, a final norm; rotary positions, GeGLU, no biases. Every third layer is global:
    its tokens see their whole document. In the others they see what is near them, with rotary positions of a smaller
    base. The first block reads what the embedding's norm has normed.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps, bias=False)
        self.dropout = config.hidden_dropout
        self.head_size = config.head_size()
        self.rotary_base, self.local_rotary_base = config.rotary_base, config.local_rotary_base
        self.local = [config.is_local(layer) for layer in range(config.num_layers)]
        self.window = config.local_window // 2  # to each side
        self.embedding = Embedding(config.padded_vocab_size(), config.hidden_size)
        self.embedding_norm = norm()
        layers = range(config.num_layers)
        self.blocks = nn.ModuleList(_block(config, norm, reads_normed=layer == 0) for layer in layers)
        self.final_norm = norm()

    def embedded(self, rows_BTD: Tensor, documents: Documents) -> Tensor:
        """[B, t, D]: the normed rows of the table; positions are the blocks' affair."""
        x_BtD = self.embedding_norm(scatter_to_group(rows_BTD, self.sequence_group, dim=1))
        return dropout(x_BtD, self.dropout, self.sequence_group, self.training)

    def block_inputs(self, documents: Documents) -> Sequence[tuple[Rotation, Documents]]:
        """Whole documents for global blocks, what is near for local ones; each with its rotation."""
        whole = self._rotation(documents, self.rotary_base), documents
        near = self._rotation(documents, self.local_rotary_base), documents.within(self.window)
        return [near if local else whole for local in self.local]

    def normed(self, x: Tensor) -> Tensor:
        """[..., D]: by the final norm."""
        normed: Tensor = self.final_norm(x)
        return normed

    def _rotation(self, documents: Documents, base: float) -> Rotation:
        return rotary_at(documents.positions_BT, self.head_size, base)


_BACKBONES: dict[str, Callable[[ModelConfig], Backbone]] = {
    "gpt_neox": GPTNeoX,
    "llama": Llama,
    "bert": Bert,
    "modernbert": ModernBert,
}

_GATE = {"blocks.*.mlp.gate": "column"}

SHARDING: dict[str, dict[str, str]] = {
    "gpt_neox": SPLIT_WEIGHTS | SPLIT_TOKENS | {"blocks.*.attention.qkv": "column"},  # whole heads
    "llama": SPLIT_WEIGHTS
    | SPLIT_HEADS
    | SPLIT_TOKENS
    | _GATE
    | dict.fromkeys(("blocks.*.attention.query_norm", "blocks.*.attention.key_norm"), "head_norm"),  # of all heads
    "bert": SPLIT_WEIGHTS | SPLIT_HEADS,  # positions and types are small
    "modernbert": SPLIT_WEIGHTS | SPLIT_HEADS | SPLIT_TOKENS | {"embedding_norm": "norm"} | _GATE,
}
"""Per family: pattern of module names (`*` stands for a layer's number) -> its kind of parallel layer."""


def build_backbone(config: ModelConfig) -> Backbone:
    """The backbone of `config` on torch's default device, with uninitialized weights. On `meta` it costs nothing."""
    return _BACKBONES[config.family](config)


# Random initial weights depend only on the seed and the parameter's name: the same on every mesh and device.
#
# Pythia: normal weights with std sqrt(2 / (5 D)) ("small init", Nguyen & Salazar 2019, arXiv 1910.05895), and 2 / (L
# sqrt(D)) where a sublayer writes to the residual stream (GPT-J's "wang init"); biases 0, norms 1. Megatron (Shoeybi
# et al. 2019, arXiv 1909.08053): one std, and 1 / sqrt(2 L) of it where a sublayer writes there.


_WRITES_TO_RESIDUAL = ("attention.output.weight", "mlp.down.weight")
_RANDN_CHUNK = 16  # torch.randn redraws the last 16 elements of a count that is no multiple of 16


def initial_value(name: str, shape: Sequence[int], seed: int, config: ModelConfig) -> Tensor:
    """The initial value of the full parameter `name`, an fp32 CPU tensor.

    A matrix with more rows starts with the same rows: padding of the vocabulary changes no token's weights.
    """
    return next(_initial_blocks(name, shape, [range(shape[0])], seed, config))


def initial_blocks(name: str, shape: Sequence[int], seed: int, config: ModelConfig) -> Iterator[Tensor]:
    """The same, bit for bit, in consecutive blocks of at most 16,384 rows, each drawn when it is needed."""
    return _initial_blocks(name, shape, block_ranges(shape[0]), seed, config)


def _initial_blocks(
    name: str, shape: Sequence[int], blocks: Iterable[range], seed: int, config: ModelConfig
) -> Iterator[Tensor]:
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    for rows in blocks:
        size = (len(rows), *shape[1:])
        if name.endswith("norm.weight"):
            yield torch.ones(size)
        elif name.endswith(".bias"):
            yield torch.zeros(size)
        else:
            count = math.prod(size)
            draws = torch.randn(-(-count // _RANDN_CHUNK) * _RANDN_CHUNK, generator=generator)
            yield draws[:count].view(size).mul_(_std(name, config))


def _std(name: str, config: ModelConfig) -> float:
    if name.endswith("embedding.weight") and config.init_embedding_std is not None:
        return config.init_embedding_std
    if config.init == "normal":
        return config.init_std
    if config.init == "megatron":
        return config.init_std / (math.sqrt(2 * config.num_layers) if name.endswith(_WRITES_TO_RESIDUAL) else 1)
    if name.endswith(_WRITES_TO_RESIDUAL):
        return 2 / (config.num_layers * math.sqrt(config.hidden_size))
    return math.sqrt(2 / (5 * config.hidden_size))
