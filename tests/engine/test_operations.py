"""What a micro-step of a small model costs a GPU: bytes of gradients, and launches by the host. Counted on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.command import build_config
from benchmarks.engines import DEEPSPEED_CONFIGS, build_engine, zipf_micro_batch
from benchmarks.rows import build_run_objective, micro_batch, token_rows
from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.estimate import run_parameters
from megahead.models.blocks import set_attention
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import Pretraining, build_parallel_model, initial_weights, load_weights_
from support.on_ranks import on_ranks

pytest.importorskip("triton", reason="needs triton (the `test` extra, or torch for CUDA)")

from support.operations import OperationCounter, gpu_code_paths  # imports the kernel

CPU = torch.device("cpu")


def config_at(stage: int, hidden: int, *overrides: str) -> RunConfig:
    """Steps of several micro-batches, of so few tokens that almost all bytes are weights and gradients."""
    shape = {"num_layers": 6, "hidden_size": hidden, "num_heads": 2, "vocab_size": 2 * hidden}
    stage_file = DEEPSPEED_CONFIGS / f"zero{stage}.json"
    return build_config(shape, 1, 4, "engine.precision=bf16", f"engine.deepspeed={stage_file}", *overrides)


def built_module(config: RunConfig) -> Pretraining:
    module = build_parallel_model(config, Group(), CPU)
    load_weights_(module, Group(), initial_weights(config))
    return module.bfloat16()


def gradient_bytes(group: Group, stage: int | None, changes: Mapping[str, Any] | None = None) -> float:
    """Bytes a parameter of a micro-step, but for the weights': 2 each, read in the forward and in the backward pass."""
    config = config_at(stage or 0, 256, "batch.global_size=3", "engine.device=cpu")
    micro, counter = zipf_micro_batch(config), OperationCounter()
    if stage is None:
        module = built_module(config)
        with counter:
            module(micro).backward()
    else:
        settings = deepspeed_config(config, 1, "cuda")
        settings.setdefault("bf16", {}).update(changes or {})
        engine = build_engine(config, Mesh.build(Group.world()), CPU, settings)
        engine.micro_step(micro)
        with counter:
            engine.micro_step(micro)
    return counter.bytes / run_parameters(config).total - 4


def test_gradients_at_zero_1_move_12_bytes_a_parameter_and_micro_step_and_not_20() -> None:
    """One is written and added to its sum in float32 by one kernel; it is not cast before. With DeepSpeed's hooks in
    the backward pass it is."""
    (alone,), (ours,), (immediate,) = (
        on_ranks(1, gradient_bytes, None),
        on_ranks(1, gradient_bytes, 1),
        on_ranks(1, gradient_bytes, 1, {"immediate_grad_update": True}),
    )
    assert alone == pytest.approx(2, abs=0.5)
    assert ours == pytest.approx(12, abs=0.5)
    assert immediate == pytest.approx(20, abs=0.5)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, documents: object, dropout: float, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def loaded_micro_batch(config: RunConfig) -> MicroBatch:
    """As the loader gives it."""
    (row,) = token_rows(config, None, 1)
    return micro_batch(config, build_run_objective(config, [row]), row).prepare_for(torch.device("cuda"))


def dispatched(group: Group) -> tuple[int, int]:
    """Operators of a micro-step: of the module that a run trains, and of the engine at stage 1."""
    config = config_at(1, 32)
    with gpu_code_paths():
        micro, module = loaded_micro_batch(config), built_module(config)
        settings = deepspeed_config(config, 1, "cuda") | {"gradient_accumulation_steps": 8, "train_batch_size": 8}
        engine = build_engine(config, Mesh.build(Group.world()), CPU, settings)
        assert isinstance(engine.module, Pretraining)
        counts = []
        for network, step in (
            (module, lambda: module(micro.to(CPU)).backward()),
            (engine.module, lambda: engine.micro_step(micro.to(CPU))),
        ):
            set_attention(network, dense_attention)
            step()
            for parameter in module.parameters():
                parameter.grad = None
            with OperationCounter() as counter:
                step()
            counts.append(counter.dispatched)
    return counts[0], counts[1]


def test_the_host_dispatches_no_more_operators_than_a_plain_loop() -> None:
    """Each is a launch on a GPU, which a small model waits for. 347 is the count of six of GPT-NeoX's blocks without
    documents, dropout, ranks and recomputation, and of the paper's N x N form."""
    ((module, engine),) = on_ranks(1, dispatched)
    assert module < 347
    assert engine <= module + 5
