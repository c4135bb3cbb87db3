"""Micro-batches padded to few shapes: the same loss and gradients, in one graph that reads no value on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megahead.config.run import RunConfig
from megahead.data.loader import training_collator
from megahead.losses.contrastive import build_objective
from megahead.models.attention_backends import attend_with_document_mask
from megahead.models.blocks import set_attention
from megahead.objectives.loader import CandidateGroups
from megahead.objectives.micro_batch import CANDIDATE_MULTIPLE, MicroBatch
from megahead.objectives.pretraining import build_pretraining
from support.initialized import initialized
from support.long import long
from support.small_checkpoint import small_config

CPU = torch.device("cpu")
END, ROWS, LENGTH = 2, 4, 24
ENCODER = {"family": "bert", "token_types": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32}
MASKING = {"mask_token": 3, "cls_token": 1, "sep_token": END, "rate": 0.3, "count": "bernoulli"}
DECODERS = {
    "headless": {"objective": {}},
    "no first tokens": {"data": {"boundary_targets": False}},
    "negatives": {"objective": {"bias": "own_once", "negatives": 9, "max_candidates": 20}},
    "vanilla": {"objective": {"name": "vanilla"}, "data": {"boundary_targets": False}},
}
ENCODERS = {
    "masked": {"model": ENCODER, "masking": MASKING},
    "masked, vanilla": {"model": ENCODER, "masking": MASKING, "objective": {"name": "vanilla"}},
    "mixed": {"model": ENCODER, "masking": MASKING, "objective": {"vanilla_weight": 0.3}},
    "diffusion": {"model": ENCODER, "masking": MASKING | {"rate": 0.15, "count": "fixed", "diffusion": True}},
}
RUNS: dict[str, dict[str, Any]] = DECODERS | ENCODERS


def config_of(name: str) -> RunConfig:
    data = {"end_token": END, "sequence_length": LENGTH, "isolate_documents": True}
    return small_config(**RUNS[name] | {"data": data | RUNS[name].get("data", {})})


def micro_batch(config: RunConfig, group_samples: int, seed: int) -> MicroBatch:
    """Random rows, some with the end of a document, each with another number of masked tokens."""
    collator = training_collator(config, [])
    assert collator is not None
    text = np.random.default_rng(seed).integers(4, 61, (ROWS, LENGTH + 1 if config.model.is_causal else LENGTH - 2))
    text[0, 7] = text[2, 11] = END
    text[1, 5] = END if seed % 2 else 5
    batch = collator.batch(text, range(seed, seed + ROWS))
    objective = build_objective(config.objective, config.model.vocab_size, torch.ones(config.model.vocab_size))
    groups = CandidateGroups(objective, group_samples, ROWS, 0)._choose_within_batch(0, batch)
    return MicroBatch(batch, groups, 0.25)


def gradients(config: RunConfig, micro: MicroBatch) -> list[Tensor]:
    """The loss and its gradients, in float64."""
    model = initialized(config).double()
    loss = model(micro)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("group_samples", [1, 2, ROWS])
@pytest.mark.parametrize("name", RUNS)
def test_what_is_added_has_no_loss_and_no_gradient(name: str, group_samples: int) -> None:
    config = config_of(name)
    micro = micro_batch(config, group_samples, seed=0)
    rounded = replace(micro, candidates=tuple(group.with_float32_biases() for group in micro.candidates))
    padded = micro.prepare_for(CPU, static_shapes=True)
    for expected, found in zip(gradients(config, rounded), gradients(config, padded), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", RUNS)
def test_shapes_repeat(name: str) -> None:
    config = config_of(name)
    micros = [micro_batch(config, 2, seed) for seed in range(6)]
    shapes = [micro.prepare_for(CPU, static_shapes=True).shapes for micro in micros]
    assert len(set(shapes)) == 1
    sizes = [(len(m.batch.target_ids_N), *(len(g.ids_U) for g in m.candidates if g.ids_U is not None)) for m in micros]
    assert len(set(sizes)) > 1
    for group in shapes[0].candidates:  # type: ignore[attr-defined]
        assert group.ids_U in (None, ((CANDIDATE_MULTIPLE,), torch.int64))


def test_a_batch_prepared_for_todays_way_has_no_shapes() -> None:
    micro = micro_batch(config_of("headless"), 2, 0)
    assert micro.shapes is None
    assert micro.prepare_for(CPU) is micro


def test_a_group_without_targets_is_left_as_it_is() -> None:
    micro = micro_batch(config_of("no first tokens"), 2, 0)
    (first, second), batch = micro.candidates, micro.batch
    count = len(first.target_N)
    empty = replace(second, target_N=second.target_N[:0])
    batch = replace(batch, target_index_N=batch.target_index_N[:count], target_ids_N=batch.target_ids_N[:count])
    padded = replace(micro, batch=batch, candidates=(first, empty)).prepare_for(CPU, static_shapes=True)
    assert [len(group.target_N) for group in padded.candidates] == [count, 0]
    assert padded.batch.weight_N is None


@pytest.mark.parametrize("name", RUNS)
def test_a_micro_step_needs_no_value_on_the_host(name: str) -> None:
    """Without data, forward and backward know the shape of every tensor and every branch."""
    config = config_of(name)
    micro = micro_batch(config, 2, seed=0).prepare_for(CPU, static_shapes=True)
    assert micro.buffer is not None
    with FakeTensorMode() as mode:
        model = build_pretraining(config)
        set_attention(model, attend_with_document_mask)
        model(micro.with_buffer(mode.from_tensor(micro.buffer))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["no first tokens", long("masked")])
def test_a_forward_pass_is_one_graph_for_all_batches_of_a_shape(name: str) -> None:
    config, graphs = config_of(name), []
    model = initialized(config)
    set_attention(model, attend_with_document_mask)

    def counting(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(model, backend=counting, fullgraph=True, dynamic=False)
    for seed in range(3):
        micro = replace(micro_batch(config, 2, seed), loss_weight=0.1 + seed).prepare_for(CPU, static_shapes=True)
        torch.testing.assert_close(compiled(micro), model(micro))
    assert len(graphs) == 1
