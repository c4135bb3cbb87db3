"""Floating-point operations of training, from the config.

A product of [m, k] and [k, n] takes 2 m k n operations. Backward computes two such products for each of forward's
(gradients of both factors), so that training is three times the forward pass (Kaplan et al. 2020, arXiv 2001.08361).
Norms, activations, softmax, lookups and recomputation are not counted.
D hidden size, A width of all heads (mostly D), F width of the MLP, L blocks, T tokens a row, U candidate rows of the
softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megahead.config import ModelConfig, RunConfig
from megahead.estimate.parameters import attention_matrices, mlp_matrices
from megahead.estimate.shorter_rows import ShorterLayers, shorter_layers


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations per input token, forward and backward, by part."""

    body: float
    """Matrices of the blocks: 3 * 2 L (4 D^2 + 2 D F), or what a Llama's have."""

    attention: float
    """Scores and weighted sums: 3 * 4 L A * context, where context is the mean number of tokens that a token sees; in
    local layers fewer."""

    head: float
    """Scores of the candidates: 3 * 2 D U, and 2 D U more each where tokens are drawn from them or missed ones are
    counted, 3 * 2 D V beside a vanilla share; and where tokens are judged, a transform and score of each,
    3 * 2 (D^2 + D)."""

    @property
    def total(self) -> float:
        return self.body + self.attention + self.head


def training_flops(
    config: ModelConfig,
    sequence_length: int,
    candidate_rows: int,
    context: float | None = None,
    targets: int | None = None,
    shorter: Sequence[ShorterLayers] = (),
) -> FlopsPerToken:
    """Operations per token of training on rows of `sequence_length` tokens.

    `candidate_rows`: for a vanilla softmax the padded vocabulary, for a headless one the unique targets of a group.
    `context`: mean number of tokens that a token of a global layer sees, itself included; when left out that of rows
    with one document: (T + 1) / 2 for causal attention, else T (isolated documents see less). `targets`: of a row, all
    T when left out; for other tokens the last block of an encoder that sees both sides computes only keys and values.
    Its transform is not counted. `shorter`: an encoder's layers that compute a share of the tokens alone.
    """
    hidden, layers = config.hidden_size, config.num_layers
    attention, mlp = attention_matrices(config), mlp_matrices(config)
    whole_row = (sequence_length + 1) / 2 if config.is_causal else sequence_length
    context = whole_row if context is None else context
    share = 1.0 if targets is None else targets / sequence_length
    saved = 0.0 if config.is_causal else 1 - share
    matrices = layers * (attention + mlp) - saved * (attention / 2 + mlp)
    near = min(context, _seen_within(config.local_window // 2, sequence_length, 1 if config.is_causal else 2))
    seen = [near if config.is_local(layer) else context for layer in range(layers)]
    for part in shorter:  # fewer tokens, each of which sees fewer
        matrices -= part.saved() * (attention + mlp)
        for layer in part.layers:
            seen[layer] = part.share * (near if config.is_local(layer) else part.share * context)
        if part.first_reads_all:  # keys and values of the others, too
            first = part.layers.start
            matrices += (1 - part.share) * attention / 2
            seen[first] = part.share * (near if config.is_local(first) else context)
    return FlopsPerToken(
        body=3 * 2 * matrices,
        attention=3 * 4 * (sum(seen) - saved * seen[-1]) * config.num_heads * config.head_size(),
        head=3 * 2 * hidden * candidate_rows * share,
    )


def run_flops(config: RunConfig, candidate_rows: int) -> FlopsPerToken:
    """Those of a run whose outputs are scored against so many rows; where a generator learns the targets, its own and
    those of the model that judges all tokens. Of phrases that are found in other rows the outputs of all tokens count,
    not the comparisons, whose number the text decides."""
    length, targets = config.data.sequence_length, config.targets_per_row()
    model, generator, head = config.trained_model(), config.generator(), _scores(config, candidate_rows)
    if generator is None:
        computed = None if config.objective.phrases else targets
        learned = training_flops(model, length, 0, targets=computed, shorter=shorter_layers(config))
        return replace(learned, head=head)
    learned = training_flops(generator, length, 0, targets=targets)
    judged = training_flops(model, length, candidate_rows=0)
    return FlopsPerToken(
        body=learned.body + judged.body,
        attention=learned.attention + judged.attention,
        head=head + 3 * 2 * (model.hidden_size**2 + model.hidden_size),
    )


def _scores(config: RunConfig, candidate_rows: int) -> float:
    """The scores of targets: three products, one more for what is drawn from them and one for the targets that are
    missed; and of all ids three, where a share of the loss is vanilla, or the one that is drawn from."""
    masking, share = config.masking, config.targets_per_row() / config.data.sequence_length
    asked, products = config.objective.replaced_tokens, 3 + (masking is not None and masking.adapts())
    drawn = 0 if asked is None else candidate_rows if asked.draws == "group" else config.model.vocab_size
    of_all_ids = 3 * config.model.padded_vocab_size() if config.objective.vanilla_weight else 0
    return share * 2 * config.model.hidden_size * (products * candidate_rows + drawn + of_all_ids)


def _seen_within(reach: int, tokens: int, sides: int) -> float:
    """Mean number of tokens that one of a document of `tokens` sees within `reach` to one or two sides, itself
    included."""
    reach = min(reach, tokens - 1)
    return 1 + sides * (reach - reach * (reach + 1) / (2 * tokens))
