"""The bag-of-words loss (DupMAE: Xiao et al. 2022, arXiv 2211.08769): each candidate's largest score over a text's
tokens must predict whether the text contains it.

N tokens with outputs, in B texts of up to T tokens, M = B T; D features (E: after the score transforms them), U
candidates; w: the candidates of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megahead.distributed.group import Group, copy_to_group, reduce_from_group
from megahead.losses.candidates import Candidates
from megahead.losses.fused_softmax import loss_dtype, without_autocast
from megahead.losses.scores import Score
from megahead.losses.softmax import DOT, Softmax

_SCORE_BYTES_ON_CPU = 2**20
"""Size of a block of scores, which stays in a core's cache (128 tokens of 128 features against 30,522 rows: 0.027 s;
with blocks of 2 MiB 0.037 s)."""

_SCORE_BYTES_ON_GPU = 2**28
"""Each block costs kernel launches: 4 blocks for 32 texts of 512 tokens against 30,522 rows in bf16 (computed)."""


class Texts(NamedTuple):
    """Which of B * T positions hold tokens of the texts."""

    index_N: Tensor
    """int64, increasing: the positions of the tokens among B * T."""

    num_texts: int
    """B."""

    length: int
    """T."""

    def split(self, sizes: Sequence[int]) -> list[Texts]:
        """Equal parts of the texts, with these numbers of tokens."""
        num_texts = self.num_texts // len(sizes)
        firsts = range(0, num_texts * len(sizes) * self.length, num_texts * self.length)
        parts = zip(self.index_N.split(list(sizes)), firsts, strict=True)
        return [Texts(index_n - first, num_texts, self.length) for index_n, first in parts]

    def pad(self, outputs_NE: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, E]: the outputs at their positions, zeros elsewhere; bool [B, T]: the tokens to pool, all positions
        of a text without tokens."""
        size = self.num_texts * self.length
        outputs_ME = outputs_NE.new_zeros(size, outputs_NE.shape[1]).index_copy(0, self.index_N, outputs_NE)
        is_token_M = torch.zeros(size, dtype=torch.bool, device=outputs_NE.device)
        is_token_BT = is_token_M.index_fill(0, self.index_N, True).view(self.num_texts, self.length)
        return outputs_ME.view(self.num_texts, self.length, -1), is_token_BT | ~is_token_BT.any(1, keepdim=True)

    def contains(self, target_N: Tensor, width: int) -> Tensor:
        """bool [B, w]: whether a text has a token with this target; targets outside of [0, w) are other ranks'."""
        column_N = target_N.where((target_N >= 0) & (target_N < width), width)
        place_N = self.index_N // self.length * (width + 1) + column_N
        is_present = torch.zeros(self.num_texts * (width + 1), dtype=torch.bool, device=target_N.device)
        return is_present.index_fill(0, place_N, True).view(self.num_texts, width + 1)[:, :width]


def bag_loss_reference(
    outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, texts: Texts, score: Score = DOT
) -> Tensor:
    """The sum of `log( sum_u exp(m_u + b_u) ) - m_p` over all texts and each text's distinct candidates p, computed
    literally; with `target_logit_has_bias` also `- b_p`.

    m_u is the largest `score` of candidate u over the text's tokens. b_u is `bias_U`; if the text contains u, it is
    `as_target_bias_U`, where that is given. The paper's code divides the same sum by the number of tokens.
    """
    scores_NU, terms = score.reference_scores(outputs_ND, rows_UD), [outputs_ND[:0].sum() + rows_UD[:0].sum()]
    zeros_U = torch.zeros(len(rows_UD), dtype=scores_NU.dtype)
    bias_U = zeros_U if candidates.bias_U is None else candidates.bias_U
    as_target_bias_U = bias_U if candidates.as_target_bias_U is None else candidates.as_target_bias_U
    for text in range(texts.num_texts):
        is_here_N = texts.index_N // texts.length == text
        present = candidates.target_N[is_here_N].unique()
        if len(present):
            largest_U = scores_NU[is_here_N].amax(0)
            biased_U = (largest_U + bias_U).index_copy(0, present, (largest_U + as_target_bias_U)[present])
            logits = candidates.target_logit(largest_U, biased_U)[present]
            terms.append((biased_U.logsumexp(0) - logits).sum())
    return torch.stack(terms).sum()


def bag_loss(softmax: Softmax, texts: Texts) -> Tensor:
    """The value of `bag_loss_reference` for the softmax's outputs, a scalar. An output's target is its own token.

    Memory: the scores of a block of texts and candidates (1 MiB on a CPU, 256 MiB on a GPU, or one candidate's),
    and some float32 matrices of B x w. Time: one product of B T x w x D; gradients flow only to the token with the
    largest score, and cost B w D. Scores are rounded as in `candidate_loss`. Collective over tensor ranks: two
    all-reduces, of B and of 3 B numbers, and for gradients one of N x E.
    """
    outputs_NE, rows_wE, candidates, score, group = softmax.local_inputs()
    if outputs_NE.shape[0] == 0:
        return softmax.loss()  # 0, connected to all inputs
    dtype = loss_dtype(outputs_NE, rows_wE, score)
    outputs_BTE, is_token_BT = texts.pad(copy_to_group(outputs_NE, group).to(dtype))
    pooled_Bw: Tensor = _PooledScores.apply(outputs_BTE, rows_wE.to(dtype), is_token_BT, score)
    return _softmax_loss(pooled_Bw, texts.contains(candidates.target_N, len(rows_wE)), candidates, group)


def _softmax_loss(pooled_Bw: Tensor, is_present_Bw: Tensor, candidates: Candidates, group: Group) -> Tensor:
    """The loss of the largest scores; `is_present_Bw`: bool, which candidates each text contains."""
    bias_w, as_target_bias_w = candidates.bias_U, candidates.as_target_bias_U
    biased_Bw = pooled_Bw if bias_w is None else pooled_Bw + bias_w.to(pooled_Bw.dtype)
    if as_target_bias_w is not None:
        biased_Bw = biased_Bw.where(~is_present_Bw, pooled_Bw + as_target_bias_w.to(pooled_Bw.dtype))
    logits_Bw = candidates.target_logit(pooled_Bw, biased_Bw).masked_fill(~is_present_Bw, 0.0)
    top_B1 = group.all_reduce_max_(biased_Bw.detach().amax(1, keepdim=True))
    parts = (biased_Bw - top_B1).exp().sum(1), logits_Bw.sum(1), is_present_Bw.sum(1).to(pooled_Bw.dtype)
    total_B, logits_B, count_B = reduce_from_group(torch.stack(parts), group).unbind()
    return (count_B * (top_B1.squeeze(1) + total_B.log()) - logits_B).sum()


class _PooledScores(torch.autograd.Function):
    """[B, w], float32 or float64: the largest score of each row over a text's tokens (ties: the first token's).

    The score is monotone in the product of outputs and rows. The largest product, or with a negative scale the
    smallest, is found in blocks of rows.
    """

    @staticmethod
    def forward(ctx: Any, outputs_BTE: Tensor, rows_wE: Tensor, is_token_BT: Tensor, score: Score) -> Tensor:
        dtype, sign = torch.promote_types(rows_wE.dtype, torch.float32), 1 if score.scale > 0 else -1
        penalty_BT = rows_wE.new_zeros(is_token_BT.shape).masked_fill(~is_token_BT, -torch.inf)
        texts, rows = _block_shape(outputs_BTE, len(rows_wE))
        products_Bw = rows_wE.new_empty(len(outputs_BTE), len(rows_wE), dtype=dtype)
        token_Bw = torch.empty_like(products_Bw, dtype=torch.int32)
        per_text = outputs_BTE * sign, penalty_BT, products_Bw, token_Bw
        with without_autocast(rows_wE.device):
            for outputs, penalty, largest, token in zip(*(each.split(texts) for each in per_text), strict=True):
                for start in range(0, len(rows_wE), rows):
                    part = slice(start, start + rows)
                    products = torch.addmm(penalty.flatten(), rows_wE[part], outputs.flatten(0, 1).T)
                    largest_wb, token_wb = products.unflatten(1, penalty.shape).max(2)
                    largest[:, part], token[:, part] = largest_wb.T, token_wb.T
            products_Bw *= sign
            derivatives_Bw = score.to_similarity_(products_Bw)
        ctx.save_for_backward(outputs_BTE, rows_wE, token_Bw, derivatives_Bw)
        ctx.scale = score.scale
        return products_Bw.mul_(score.scale)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_Bw: Tensor) -> tuple[Tensor | None, ...]:
        outputs_BTE, rows_wE, token_Bw, derivatives_Bw = ctx.saved_tensors
        gradient_Bw = gradient_Bw * ctx.scale if derivatives_Bw is None else gradient_Bw * ctx.scale * derivatives_Bw
        with without_autocast(rows_wE.device):
            grad_outputs = _outputs_gradient(gradient_Bw, token_Bw, rows_wE, outputs_BTE.shape[1])
            grad_rows = _rows_gradient(gradient_Bw, token_Bw, outputs_BTE)
        return grad_outputs.to(outputs_BTE.dtype), grad_rows.to(rows_wE.dtype), None, None


def _block_shape(outputs_BTE: Tensor, width: int) -> tuple[int, int]:
    """Texts and rows whose scores are a block: all rows of as many texts as there is room for, or some of one text."""
    scores = (_SCORE_BYTES_ON_GPU if outputs_BTE.is_cuda else _SCORE_BYTES_ON_CPU) // outputs_BTE.element_size()
    num_texts, length = outputs_BTE.shape[:2]
    texts = min(num_texts, max(1, scores // (length * width)))
    return texts, max(1, scores // (length * texts))


# In each text a row's score comes from one token. So a token's gradient is a weighted sum of rows, and a row's of
# tokens. `embedding_bag` adds them up in order, without atomic additions.


def _rows_gradient(gradient_Bw: Tensor, token_Bw: Tensor, outputs_BTE: Tensor) -> Tensor:
    """[w, E]: the sum over texts of the gradient times the output of the row's token."""
    num_texts, length = outputs_BTE.shape[:2]
    first_B = torch.arange(0, num_texts * length, length, device=token_Bw.device, dtype=torch.int32)
    index_Bw = token_Bw + first_B[:, None]
    outputs_ME = outputs_BTE.flatten(0, 1).to(gradient_Bw.dtype)
    weights_wB = gradient_Bw.T.contiguous()
    return F.embedding_bag(index_Bw.T.contiguous(), outputs_ME, per_sample_weights=weights_wB, mode="sum")


def _outputs_gradient(gradient_Bw: Tensor, token_Bw: Tensor, rows_wE: Tensor, length: int) -> Tensor:
    """[B, T, E]: the sum of gradient times row over the rows whose largest score is this token's."""
    (num_texts, width), device = token_Bw.shape, token_Bw.device
    sorted_Bw, row_Bw = token_Bw.sort(dim=1, stable=True)
    tokens_BT = torch.arange(length, device=device, dtype=torch.int32).repeat(num_texts, 1)
    start_BT = torch.searchsorted(sorted_Bw, tokens_BT) + width * torch.arange(num_texts, device=device)[:, None]
    rows, weights = rows_wE.to(gradient_Bw.dtype), gradient_Bw.gather(1, row_Bw).flatten()
    sums = F.embedding_bag(row_Bw.flatten(), rows, start_BT.flatten(), per_sample_weights=weights, mode="sum")
    return sums.view(num_texts, length, -1)
