"""What the forward pass keeps for the backward pass.

t tensor ranks, D hidden size, A width of all heads, K of the key heads, F width of the MLP.
"""

from __future__ import annotations

from megahead.config import RunConfig
from megahead.estimate.shorter_rows import shorter_layers


def activation_bytes(config: RunConfig, compute: int) -> float:
    """Bytes kept for the backward pass, `compute` for each element.

    Per token, a block keeps its input, two normed inputs and (7 D + 2 F) / t elements. With activation checkpointing
    each block keeps its input alone, and one block at a time all of it; `selective` also keeps 2 D + (4 D + F) / t of
    products and attention. In a Llama these are three inputs and (3 A + 2 K + 4 F) / t, with norms of heads A + K more,
    and 2 D + (2 A + 2 K + 2 F) / t; on a CPU its norms keep their outputs twice. Sequence parallelism divides inputs by
    t too, but gathers one layer's at a time.
    """
    model, tensor = config.trained_model(), config.parallel.tensor
    tokens = config.batch.micro_size * config.data.sequence_length
    block_input = model.hidden_size / (tensor if config.parallel.sequence else 1)
    heads, mlp = model.num_heads * model.head_size() / tensor, model.mlp_size() / tensor
    keys = max(model.key_heads() / tensor, 1) * model.head_size()
    if model.has_gated_mlp():
        inside, products = (3 + model.qk_norm) * heads + (2 + model.qk_norm) * keys + 4 * mlp, 2 * (heads + keys + mlp)
        block = 4 * block_input + inside
    else:
        block, products = 3 * block_input + 7 * heads + 2 * mlp, 4 * heads + mlp
    recompute = config.engine.activation_checkpointing
    selective = block_input + 2 * model.hidden_size + products
    kept = {False: block, True: block_input, "selective": selective}[recompute]
    working = (block if recompute else 0) + model.hidden_size - block_input
    generator = config.generator()
    layers = model.num_layers - sum(part.saved() for part in shorter_layers(config))
    layers += generator.num_layers if generator else 0
    return compute * tokens * (layers * kept + working)
