"""The loss against the paper's own N x N form in float64, and where numbers get extreme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megahead.config.objective import CPU_CHUNKS, ChunkSize
from megahead.losses import contrastive, fused_softmax
from megahead.losses.candidates import Candidates, all_rows_as_candidates, log_unigram, unique_candidates
from megahead.losses.contrastive import cwt_loss
from megahead.losses.scores import Dot
from megahead.losses.softmax import EvaluationSums, Softmax, candidate_loss, candidate_loss_reference


def paper_form(outputs: Tensor, targets: Tensor, embedding: Tensor, temperature: float = 1.0) -> Tensor:
    """N x N, duplicates kept, as the paper's listing has it."""
    scores = outputs @ embedding[targets].T / temperature
    return (scores.logsumexp(dim=1) - scores.diagonal()).mean()


def drawn(n: int, d: int, v: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(n, d, generator=generator, dtype=torch.float64, requires_grad=True)
    embedding = torch.randn(v, d, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(v, (n,), generator=generator).square() // v  # few ids often, many rarely
    return outputs, targets, embedding


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 70),
    d=st.integers(1, 9),
    v=st.integers(1, 40),
    temperature=st.floats(0.3, 3),
    seed=st.integers(0, 99),
)
def test_equals_the_papers_form_in_value_and_both_gradients(
    n: int, d: int, v: int, temperature: float, seed: int
) -> None:
    outputs, targets, embedding = drawn(n, d, v, seed)
    ours = cwt_loss(outputs, targets, embedding, temperature=temperature)
    theirs = paper_form(outputs, targets, embedding, temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for mine, expected in zip(
        torch.autograd.grad(ours, [outputs, embedding]), torch.autograd.grad(theirs, [outputs, embedding]), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("error")  # torch's, should the buffer of scores not fit
def test_chunks_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, targets, embedding = drawn(33, 5, 20)
    candidates = unique_candidates(targets)
    rows = embedding[candidates.ids_U].detach().requires_grad_()
    args = (outputs, rows, candidates, Dot(0.7))
    expected = candidate_loss_reference(*args)
    expected_grads = torch.autograd.grad(expected, [outputs, rows])
    for chunk_bytes in (1, 700, 10**9):  # one output at a time, a ragged few, all at once
        monkeypatch.setattr(fused_softmax, "CPU_CHUNKS", ChunkSize(chunk_bytes, min_outputs=1, multiple=1))
        loss = candidate_loss(*args)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(torch.autograd.grad(loss, [outputs, rows]), expected_grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, *(each.nbytes for each in tree_leaves(result) if isinstance(each, Tensor)), 0)
        return result


def test_memory_does_not_grow_with_outputs_times_candidates() -> None:
    outputs, rows = torch.randn(3000, 2, requires_grad=True), torch.randn(2000, 2, requires_grad=True)
    candidates = all_rows_as_candidates(torch.randint(2000, (3000,)))
    with LargestTensor() as largest:
        candidate_loss(outputs, rows, candidates).backward()
        Softmax(outputs, rows, candidates).sums()
    assert largest.bytes <= CPU_CHUNKS.score_bytes < 4 * 3000 * 2000


@pytest.mark.parametrize("others_learn", [True, False])
def test_a_bias_that_is_learned_gets_its_gradient(others_learn: bool) -> None:
    outputs, targets, embedding = drawn(12, 4, 9)
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)
    arguments = (outputs, embedding) if others_learn else (outputs.detach(), embedding.detach())
    among = Candidates(None, bias, targets, target_logit_has_bias=True)
    ours, reference = (loss(*arguments, among, Dot(0.7)) for loss in (candidate_loss, candidate_loss_reference))
    wanted = [bias, outputs, embedding] if others_learn else [bias]
    for mine, exact in zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(reference, wanted), strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finite_at_extreme_scores(dtype: torch.dtype) -> None:
    outputs = torch.tensor([[100.0, 0.0], [-100.0, 0.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    embedding = torch.tensor([[100.0, 0.0], [-100.0, 0.0]], dtype=dtype, requires_grad=True)
    loss = cwt_loss(outputs, torch.tensor([1, 0, 0]), embedding)  # scores of +-1e4, the wrong way round
    assert loss.item() == pytest.approx(2e4 * 2 / 3, rel=2e-3)
    for gradient in torch.autograd.grad(loss, [outputs, embedding]):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()


def test_half_precision_is_no_worse_than_its_inputs_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU has no units for bf16: with them `test_half_row_step`."""
    monkeypatch.setattr(fused_softmax, "has_fast_bf16", lambda _: False)
    outputs, targets, embedding = drawn(64, 16, 30)
    exact = paper_form(outputs, targets, embedding)
    rounded = cwt_loss(outputs.bfloat16(), targets, embedding.bfloat16())
    again = paper_form(outputs.bfloat16().double(), targets, embedding.bfloat16().double())
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), again, rtol=1e-5, atol=1e-5)  # fp32 arithmetic on rounded inputs
    assert abs(rounded - exact) < 0.05


def test_autocast_does_not_round_what_is_given_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_softmax, "has_fast_bf16", lambda _: False)
    outputs, targets, embedding = drawn(64, 16, 30)
    arguments = (outputs.float(), targets, embedding.float())
    with torch.autocast("cpu", torch.bfloat16):
        cast = cwt_loss(*arguments)
    torch.testing.assert_close(cast, cwt_loss(*arguments), rtol=0, atol=0)


def test_no_targets_is_legal_and_connected() -> None:
    outputs = torch.randn(0, 4, requires_grad=True)
    embedding = torch.zeros(7, 4, requires_grad=True)
    loss = cwt_loss(outputs, torch.zeros(0, dtype=torch.int64), embedding)
    assert loss.item() == 0
    loss.backward()
    assert embedding.grad is not None
    assert embedding.grad.abs().sum() == 0


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
@pytest.mark.parametrize("ignored", [(), (0, 5, 11), range(12)], ids=str)
def test_outputs_without_a_target_are_left_out(shape: tuple[int, ...], ignored: Sequence[int]) -> None:
    outputs, targets, embedding = drawn(12, 4, 9)
    outputs = outputs.detach()
    outputs[list(ignored)] = torch.nan
    outputs.requires_grad_()
    targets[list(ignored)] = -100
    chosen = targets != -100
    expected = cwt_loss(outputs[chosen], targets[chosen], embedding)
    wanted = torch.autograd.grad(expected, [outputs, embedding])
    for looks in (True, False):  # as on a CPU, and as where it would wait
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contrastive, "_can_read_values", lambda ids, looks=looks: looks)
            loss = cwt_loss(outputs.view(*shape, 4), targets.view(shape), embedding)
        torch.testing.assert_close(loss, expected)
        for mine, theirs in zip(torch.autograd.grad(loss, [outputs, embedding]), wanted, strict=True):
            torch.testing.assert_close(mine, theirs.nan_to_num())


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "a target too few": (
        lambda o, t, e: (o, t[:-1], e),
        r"`target_ids_N` must have a target for each output, \[8\], but",
    ),
    "a target too many": (lambda o, t, e: (o[:-1], t, e), r"but is \[8\] instead; shift both alike"),
    "one output": (lambda o, t, e: (o[:1], t, e), "must have a target for each output"),
    "no outputs": (lambda o, t, e: (o[:0], t, e), "must have a target for each output"),
    "another shape": (lambda o, t, e: (o, t.view(2, 4), e), "must have a target for each output"),
    "another width": (lambda o, t, e: (o[:, :3], t, e), r"`outputs_ND` must be as wide as embedding_VD, \[N, 4\]"),
    "an id too large": (lambda o, t, e: (o, t + 9, e), r"`target_ids_N` must be ids below 9 \(or -100: no target\)"),
    "a negative id": (lambda o, t, e: (o, t - 50, e), "`target_ids_N` must be ids below 9"),
    "fractions": (lambda o, t, e: (o, t.float(), e), "`target_ids_N` must hold integers, but is torch.float32"),
    "truth values": (lambda o, t, e: (o, t > 3, e), "`target_ids_N` must hold integers, but is torch.bool"),
    "whole outputs": (lambda o, t, e: (o.long(), t, e), "`outputs_ND` must hold floating-point numbers"),
    "a row as a table": (lambda o, t, e: (o, t, e[0]), r"`embedding_VD` must be a table, \[V, D\]"),
    "a module": (lambda o, t, e: (o, t, torch.nn.Embedding(9, 4)), "must be a tensor, .* give its `.weight`"),
    "a list": (lambda o, t, e: (o, t.tolist(), e), "`target_ids_N` must be a tensor, but is a list"),
    "another device": (lambda o, t, e: (o.to("meta"), t, e), "`outputs_ND` must be on the device of embedding_VD"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit_are_refused_in_a_sentence(name: str) -> None:
    change, sentence = WRONG[name]
    with pytest.raises(ValueError, match=sentence):
        cwt_loss(*change(*drawn(8, 4, 9)))


@pytest.mark.parametrize("temperature", [0.0, -1.0, torch.nan, torch.inf, 1e-300, "1", True])
def test_a_temperature_is_a_positive_number(temperature: float) -> None:
    with pytest.raises(ValueError, match="`temperature` must be a positive number, but is"):
        cwt_loss(*drawn(8, 4, 9), temperature=temperature)


def test_a_second_derivative_is_refused() -> None:
    outputs, targets, embedding = drawn(8, 4, 9)
    (gradient,) = torch.autograd.grad(cwt_loss(outputs, targets, embedding), outputs, create_graph=True)
    with pytest.raises(RuntimeError, match="must be differentiated once, but a second derivative was requested"):
        gradient.square().sum().backward()


def test_gradients_may_be_differentiated_by_the_losss_factor() -> None:
    """As GradNorm does, to weight losses."""
    outputs, targets, embedding = drawn(8, 4, 9)
    factor = torch.tensor(2.0, requires_grad=True)
    slopes = []
    for form in (cwt_loss, paper_form):
        loss = factor * form(outputs, targets, embedding)
        (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
        slopes += torch.autograd.grad(gradient.norm(), factor)
    torch.testing.assert_close(*slopes)


def test_no_targets_have_a_loss_in_the_type_of_others() -> None:
    outputs, _, embedding = drawn(8, 4, 9)
    loss = cwt_loss(outputs[:0], torch.zeros(0, dtype=torch.int64), embedding)
    assert loss.dtype == torch.float64


def test_a_candidate_with_bias_minus_infinity_is_no_candidate() -> None:
    outputs, targets, embedding = drawn(12, 4, 9)
    candidates = unique_candidates(targets)
    assert candidates.ids_U is not None
    assert candidates.bias_U is not None
    rows = embedding[candidates.ids_U].detach()
    padded_rows = torch.cat([rows, torch.full((3, 4), 50.0)])
    padded_bias = torch.cat([candidates.bias_U, torch.full((3,), -torch.inf)])
    plain = candidate_loss(outputs, rows, candidates)
    padded = candidate_loss(outputs, padded_rows, replace(candidates, bias_U=padded_bias))
    torch.testing.assert_close(padded, plain)
    assert torch.autograd.grad(padded, [outputs])[0].isfinite().all()


def test_own_candidates_point_at_own_targets() -> None:
    targets = torch.tensor([5, 3, 5, 5, 9])
    candidates = unique_candidates(targets)
    assert candidates.ids_U is not None
    assert candidates.bias_U is not None
    assert torch.equal(candidates.ids_U[candidates.target_N], targets)
    torch.testing.assert_close(candidates.bias_U.exp(), torch.tensor([1.0, 3.0, 1.0], dtype=torch.float64))


def test_scores_are_those_of_the_softmax() -> None:
    outputs, targets, embedding = drawn(20, 4, 9)
    bias = torch.randn(9)
    log_probs = (outputs @ embedding.T / 0.5 + bias).log_softmax(dim=1)
    scores = Softmax(outputs, embedding, all_rows_as_candidates(targets, bias), Dot(0.5)).sums()
    assert scores.loss == pytest.approx(-log_probs.gather(1, targets[:, None]).sum().item(), rel=1e-9)
    assert scores.correct == int((log_probs.argmax(1) == targets).sum())
    assert scores.targets == 20


def test_a_target_that_ties_with_another_candidate_is_not_correct() -> None:
    scores = Softmax(torch.zeros(6, 4), torch.zeros(7, 4), all_rows_as_candidates(torch.arange(6))).sums()
    assert scores.correct == 0


def test_no_targets_score_nothing() -> None:
    scores = Softmax(
        torch.randn(0, 4), torch.randn(7, 4), all_rows_as_candidates(torch.zeros(0, dtype=torch.int64))
    ).sums()
    assert scores == EvaluationSums(0.0, 0, 0, 0.0)


def test_pmi_head_recovers_the_distribution_that_training_aims_at() -> None:
    """One free score per (context, token), trained by CWT to its optimum, plus log q, is log p(v | context)."""
    generator = torch.Generator().manual_seed(0)
    joint = torch.rand(3, 5, generator=generator) ** 2
    joint /= joint.sum()
    pairs = torch.multinomial(joint.flatten(), 20_000, replacement=True, generator=generator)
    contexts, targets = pairs // 5, pairs % 5
    outputs = torch.zeros(3, 5, requires_grad=True)  # embedding = identity: o.e_v is a free score
    optimizer = torch.optim.LBFGS([outputs], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cwt_loss(outputs[contexts], targets, torch.eye(5))
        loss.backward()
        return loss

    optimizer.step(closure)
    counts = torch.bincount(targets, minlength=5)
    head = (outputs.detach() + log_unigram(counts, 5)).softmax(dim=1)
    empirical = torch.zeros(3, 5).index_put_((contexts, targets), torch.tensor(1.0), accumulate=True)
    torch.testing.assert_close(head, empirical / empirical.sum(1, keepdim=True), atol=2e-3, rtol=2e-2)


def test_unigram_is_smooth_finite_and_normalised() -> None:
    counts = torch.tensor([1000, 0, 0, 24, 7])
    uniform = log_unigram(counts, 4)
    assert uniform.shape == (4,)
    assert uniform.exp().sum().item() == pytest.approx(1)
    assert uniform[1] == uniform[2]
    informed = log_unigram(counts, 4, prior_counts_V=torch.tensor([9, 90, 0, 0, 0]))
    assert informed.isfinite().all()
    assert informed[1] > informed[2]


def test_the_unigram_is_smoothed_by_as_many_observations_as_there_are_ids() -> None:
    """Spread evenly, or as the whole text has them, each id there once more."""
    counts = torch.tensor([7, 0, 1, 0, 99])
    even = torch.tensor([8, 1, 2, 1]) / 12
    torch.testing.assert_close(log_unigram(counts, 4).exp(), even)
    text = torch.tensor([5, 2, 0, 1, 99])
    spread = (torch.tensor([7, 0, 1, 0]) + 4 * torch.tensor([6, 3, 1, 2]) / 12) / 12
    torch.testing.assert_close(log_unigram(counts, 4, prior_counts_V=text).exp(), spread)
