"""Operations from the config equal those that torch counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megahead.config.model import ModelConfig
from megahead.config.objective import ObjectiveConfig
from megahead.config.run import RunConfig
from megahead.data.loader import held_out_collator
from megahead.estimate import SubsetLayers, run_flops, training_flops
from megahead.losses.bag_of_words import Texts, bag_loss
from megahead.losses.candidates import all_rows_as_candidates, unique_candidates
from megahead.losses.fused_softmax import TorchChunkSoftmax
from megahead.losses.softmax import Softmax
from megahead.models.documents import Documents, TargetPositions, TokenSubset
from megahead.models.families import build_backbone
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.replaced_tokens import ReplacedTokens
from support.causal_rows import causal_batch
from support.initialized import initialized
from support.small_checkpoint import small_config

CONFIG = ModelConfig(num_layers=2, hidden_size=48, num_heads=3, intermediate_size=100, vocab_size=61, vocab_multiple=16)


def test_equal_to_counted_matrix_products():
    """torch's plain attention scores every pair, so each token sees the whole row."""
    backbone = build_backbone(CONFIG)
    rows = torch.randn(2, 10, 48, requires_grad=True)
    candidates = torch.randn(7, 48, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        (backbone.encode(rows, Documents.whole_rows(2, 10)) @ candidates.T).sum().backward()
    estimate = training_flops(CONFIG, sequence_length=10, candidate_rows=7, context=10)
    assert counter.get_total_flops() == pytest.approx(20 * estimate.total)


GEMMA3 = {"family": "gemma3", "num_key_heads": 1, "head_dim": 24}


@pytest.mark.parametrize(
    "more", [{}, {"num_key_heads": 1, "head_dim": 24, "qk_norm": True}, GEMMA3 | {"global_every": 1}], ids=str
)
def test_a_llama_is_counted_with_its_gate_and_its_key_heads(more: dict[str, Any]) -> None:
    shape = {"num_layers": 2, "hidden_size": 48, "num_heads": 3, "intermediate_size": 100, "vocab_size": 61}
    config = ModelConfig(**{"family": "llama"} | shape | more)
    rows = torch.randn(2, 10, 48, requires_grad=True)
    candidates = torch.randn(7, 48, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        (build_backbone(config).encode(rows, Documents.whole_rows(2, 10)) @ candidates.T).sum().backward()
    estimate = training_flops(config, sequence_length=10, candidate_rows=7, context=10)
    assert counter.get_total_flops() == pytest.approx(20 * estimate.total)


def test_a_local_layer_of_a_gemma_attends_to_its_window_alone() -> None:
    """Of 10 tokens the n-th sees min(n, 4): 34 in all."""
    shape = {"num_layers": 2, "hidden_size": 48, "num_heads": 3, "vocab_size": 61}
    config = ModelConfig(**GEMMA3 | shape | {"global_every": 2, "local_window": 4})
    flops = training_flops(config, sequence_length=10, candidate_rows=7)
    assert flops.attention == pytest.approx(3 * 4 * (3.4 + 5.5) * 3 * 24)


def test_an_encoder_is_counted_with_its_last_block_at_the_targets():
    encoder = ModelConfig(
        family="bert",
        num_layers=2,
        hidden_size=48,
        num_heads=3,
        intermediate_size=100,
        vocab_size=61,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    backbone = build_backbone(encoder)
    rows = torch.randn(2, 10, 48, requires_grad=True)
    candidates = torch.randn(7, 48, requires_grad=True)
    targets = TargetPositions(torch.tensor([1, 4, 7, 12, 15, 19]), 2, 10, max_per_row=3)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        (backbone.encode_at(rows, Documents.whole_rows(2, 10), targets) @ candidates.T).sum().backward()
    estimate = training_flops(encoder, sequence_length=10, candidate_rows=7, targets=3)
    assert counter.get_total_flops() == pytest.approx(20 * estimate.total)


@pytest.mark.parametrize("reads_all", [False, True])
@pytest.mark.parametrize("layers", [range(1), range(2), range(1, 3)], ids=str)
def test_layers_that_compute_some_tokens_alone_are_counted_with_fewer(layers: range, reads_all: bool) -> None:
    shape = {"num_layers": 4, "hidden_size": 48, "num_heads": 3, "intermediate_size": 100, "vocab_size": 61}
    encoder = ModelConfig(family="bert", hidden_dropout=0.0, attention_dropout=0.0, **shape)
    rows, at = torch.randn(2, 10, 48, requires_grad=True), torch.tensor([1, 4, 7, 8, 12, 14, 15, 19])
    kept = TargetPositions(torch.tensor([k for k in range(20) if k not in at.tolist()]), 2, 10, max_per_row=6)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        targets, subsets = TargetPositions(at, 2, 10, max_per_row=4), [TokenSubset(kept, layers, reads_all)]
        build_backbone(encoder).encode_at(rows, Documents.whole_rows(2, 10), targets, subsets).sum().backward()
    estimate = training_flops(encoder, 10, 0, targets=4, subsets=[SubsetLayers(layers, 0.6, reads_all)])
    assert counter.get_total_flops() == pytest.approx(20 * estimate.total)
    assert estimate.total < training_flops(encoder, 10, 0, targets=4).total


MODERNBERT: dict[str, Any] = {
    **{"family": "modernbert", "num_layers": 4, "hidden_size": 48, "num_heads": 3, "intermediate_size": 100},
    **{"vocab_size": 61, "local_window": 4},
}


@pytest.mark.parametrize("targets", [None, 3])
def test_global_layers_alone_are_counted_as_torch_counts_them(targets: int | None) -> None:
    config = ModelConfig(**MODERNBERT, global_every=1)
    rows, at = torch.randn(2, 10, 48, requires_grad=True), torch.tensor([1, 4, 7, 12, 15, 19])
    backbone, documents = build_backbone(config), Documents.whole_rows(2, 10)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        some = TargetPositions(at, 2, 10, max_per_row=3)
        hidden = backbone.encode(rows, documents) if targets is None else backbone.encode_at(rows, documents, some)
        hidden.sum().backward()
    assert counter.get_total_flops() == pytest.approx(20 * training_flops(config, 10, 0, targets=targets).total)


@pytest.mark.parametrize("window", [2, 4, 18, 100])
@pytest.mark.parametrize("length", [1, 3, 10])
def test_local_layers_are_counted_by_what_their_tokens_see(window: int, length: int) -> None:
    """Of four layers the second and the third are local."""
    config = ModelConfig(**MODERNBERT | {"local_window": window})
    seen = Documents.whole_rows(1, length).with_window(window // 2).mask_BTT.sum() / length
    attention = training_flops(config, length, 0).attention
    assert attention == pytest.approx(3 * 4 * 48 * (2 * length + 2 * float(seen)))
    assert training_flops(config, length, 0, context=1.0).attention == pytest.approx(3 * 4 * 48 * 4)


def test_a_whole_row_shows_each_token_half_of_it():
    causal, full = training_flops(CONFIG, 9, 64), training_flops(CONFIG, 9, 64, context=9)
    assert causal.attention == pytest.approx(full.attention * 5 / 9)
    assert (causal.body, causal.head) == (full.body, full.head)


def test_long_known_rule_of_six_operations_per_weight():
    """Where matrices dominate, training costs six operations per weight and token."""
    config = ModelConfig(size="pythia-6.9b", vocab_size=50277)
    weights = 32 * 12 * 4096**2
    assert training_flops(config, 1, 0).total == pytest.approx(6 * weights, rel=1e-3)


@pytest.mark.parametrize("window", [2, 4, 40])
def test_a_causal_encoder_is_counted_with_all_outputs_and_what_precedes_them(window: int) -> None:
    """Attention by what masks let through; the rest is that of the same encoder with a target at each token."""
    causal, both = (
        ModelConfig(**MODERNBERT | {"global_every": 2, "local_window": window, "is_causal": is_causal})
        for is_causal in (True, False)
    )
    whole = Documents.whole_rows(1, 10)
    near = whole.with_window(window // 2)
    seen = [float(documents.causal_mask_BTT.sum()) / 10 for documents in (whole, near, whole, near)]
    estimate, other = training_flops(causal, 10, 7, targets=8), training_flops(both, 10, 7)
    assert estimate.attention == pytest.approx(3 * 4 * sum(seen) * 48)
    assert estimate.body == other.body
    assert estimate.head == pytest.approx(0.8 * other.head)


def test_outputs_of_all_tokens_are_counted_where_phrases_are_found():
    shape = {"family": "bert", "num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32}
    plain, phrases = (
        small_config(
            model=shape,
            data={"end_token": 2, "sequence_length": 18},
            masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "rate": 0.25},
            objective=objective,
        )
        for objective in ({}, {"phrases": {"group_samples": 2}})
    )
    estimate, every = run_flops(phrases, 7), training_flops(phrases.model, 18, candidate_rows=0)
    assert (estimate.body, estimate.attention) == (every.body, every.attention)
    assert estimate.head == run_flops(plain, 7).head


def test_a_generator_and_all_tokens_classified_are_counted():
    config = small_config(
        model={"family": "bert", "num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32},
        data={"end_token": 2, "sequence_length": 18},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "rate": 0.25},
        objective={"replaced_tokens": {"generator_layers": 1}},
    )
    model, hidden = initialized(config), config.model.hidden_size
    rows, candidates = (torch.randn(*size, hidden, requires_grad=True) for size in ((2, 18), (7,)))
    targets = TargetPositions(torch.tensor([1, 4, 7, 12, 19, 22, 25, 30]), 2, 18, max_per_row=4)
    documents, detection = Documents.whole_rows(2, 18), model.auxiliary
    assert isinstance(detection, ReplacedTokens)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        outputs = detection.generator.encode_at(rows, documents, targets)
        (outputs @ candidates.T).sum().backward()
        outputs.detach() @ candidates.detach().T  # of which is drawn
        detection.head(model.backbone.encode(rows, documents).flatten(0, 1)).sum().backward()
    assert counter.get_total_flops() == pytest.approx(36 * run_flops(config, 7).total)


@pytest.mark.parametrize(
    ("decoder", "bag_weight"), [({"retromae": {}}, 0), ({"retromae": {"bag_weight": 1}}, 1), ({"tsdae": {}}, 0)]
)
def test_a_decoder_of_texts_and_its_candidates_are_counted(decoder, bag_weight):
    """Of rows that are one document, whose every token between [CLS] and [SEP] is a target of the decoder."""
    config = small_config(
        model={"family": "bert", "num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32},
        data={"end_token": 2, "sequence_length": 18},
        batch={"global_size": 2, "micro_size": 2},
        masking={"mask_token": 3, "cls_token": 1, "sep_token": 2, "rate": 0.25},
        objective={"name": "vanilla", "tied": True, **decoder},
    )
    plain = config.model_copy(update={"objective": ObjectiveConfig(name="vanilla", tied=True)})
    model, hidden, all_ids = initialized(config), config.model.hidden_size, config.model.padded_vocab_size()
    decoder = model.auxiliary.decoder
    first, rows, table = (torch.randn(*size, hidden, requires_grad=True) for size in ((2,), (2, 18), (all_ids,)))
    mask = torch.ones(2, 18, 18, dtype=torch.bool)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        (decoder(first, rows, mask, torch.arange(36)) @ table.T).sum().backward()
        if bag_weight:
            texts, candidates = Texts(torch.arange(36), 2, 18), all_rows_as_candidates(torch.arange(36))
            bag_loss(Softmax(rows.flatten(0, 1), table, candidates), texts).backward()
    with_decoder, without = run_flops(config, all_ids), run_flops(plain, all_ids)
    more, more_of_outputs = with_decoder.head - without.head, with_decoder.body - without.body
    assert (more_of_outputs > 0) == bool(bag_weight)
    of_ends = 4 * 3 * 2 * hidden * all_ids  # which are no targets
    assert 36 * more == pytest.approx(counter.get_total_flops() - of_ends)


def test_heads_of_tokens_further_ahead_are_counted():
    """Blocks, and a softmax for each; their attention as that of a decoder, of which torch counts every pair."""
    config = small_config(
        model={**CONFIG.model_dump(), "vocab_size": 64},
        data={"sequence_length": 18},
        objective={"name": "vanilla", "tied": True, "multi_token": {"heads": 2}},
    )
    plain = config.model_copy(update={"objective": ObjectiveConfig(name="vanilla", tied=True)})
    model, documents = initialized(config), Documents.whole_rows(2, 18)
    heads, backbone = model.auxiliary, model.backbone
    hidden, table = (torch.randn(*size, 48, requires_grad=True) for size in ((2, 18), (64,)))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        sum((heads.outputs(k, hidden, documents, backbone) @ table.T).sum() for k in (1, 2)).backward()
    more = run_flops(config, 64).total - run_flops(plain, 64).total
    of_later_tokens = 2 * 3 * 4 * 48 * (18 - 19 / 2)
    assert counter.get_total_flops() == pytest.approx(36 * (more + of_later_tokens))
    headless = config.model_copy(update={"objective": ObjectiveConfig(multi_token={"heads": 2})})
    of_two_candidates = run_flops(headless, 9).head - run_flops(headless, 7).head
    assert of_two_candidates == pytest.approx(3 * 3 * 2 * 48 * 2)  # those of next tokens, for all three predictions


def counted_step(config: RunConfig, misses: bool = False) -> tuple[float, int]:
    """Operations of a step of 4 rows by torch's count, without rotations, and how many candidates it has."""
    tokens, collator = np.random.default_rng(0).integers(4, 61, (4, 19)), held_out_collator(config)
    cut = {"end_token": 0, "isolate_documents": False, "boundary_targets": True}
    batch = causal_batch(tokens, **cut) if config.masking is None else collator.batch(tokens[:, :16], range(4))
    find = unique_candidates if config.objective.name == "headless" else all_rows_as_candidates
    model, candidates = initialized(config), find(batch.target_ids_N)
    model.on_errors = (lambda *_: None) if misses else None
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(MicroBatch(batch, (candidates,), 1.0)).backward()
    return counter.get_total_flops(), 0 if candidates.ids_U is None else candidates.ids_U.numel()


@pytest.mark.parametrize(("mode", "objective"), [("table", {}), ("probe", {"name": "vanilla"})])
def test_frozen_weights_are_counted_without_gradients(mode: str, objective: dict[str, Any]) -> None:
    shape = {"model": {**CONFIG.model_dump(), "vocab_size": 64}, "data": {"sequence_length": 18}}
    init = {"from_checkpoint": "earlier", "mode": mode}
    whole, frozen = (small_config(**shape, objective=objective, **more) for more in ({}, {"init": init}))
    (all_flops, rows), (fewer, _) = counted_step(whole), counted_step(frozen)
    before, after = run_flops(whole, rows), run_flops(frozen, rows)
    attention = 18 / ((18 + 1) / 2) * (before.attention - after.attention)  # of which torch counts every pair
    assert all_flops - fewer == pytest.approx(72 * (before.body - after.body + attention))
    assert before.head == after.head


def test_a_vanilla_share_of_the_loss_is_counted_with_all_ids(monkeypatch):
    """torch counts no product that is added in place."""
    monkeypatch.setattr(TorchChunkSoftmax, "add_matmul_", lambda _, total, left, right: total.add_(left @ right))
    plain, mixed = (
        small_config(model={**CONFIG.model_dump(), "vocab_size": 64}, data={"sequence_length": 18}, objective=objective)
        for objective in ({}, {"vanilla_weight": 0.3, "tied": True})
    )
    (before, rows), (after, _) = counted_step(plain), counted_step(mixed)
    assert after - before == pytest.approx(72 * (run_flops(mixed, rows).total - run_flops(plain, rows).total))


@pytest.mark.parametrize("by", [{"strategy": "hardest"}, {"dropping": {"from_layer": 1, "by": "hardest"}}], ids=str)
def test_what_finds_the_hardest_tokens_is_counted(by: dict[str, Any]) -> None:
    ids = {"mask_token": 3, "cls_token": 1, "sep_token": 2}
    plain, hardest = (
        small_config(
            model={"family": "bert", "num_layers": 3, "hidden_dropout": 0.0, "attention_dropout": 0.0},
            data={"end_token": 2, "sequence_length": 18},
            masking=ids | masks,
        )
        for masks in ({}, by)
    )
    (before, rows), (after, _) = counted_step(plain), counted_step(plain, misses=True)
    assert after - before == pytest.approx(72 * (run_flops(hardest, rows).head - run_flops(plain, rows).head))
