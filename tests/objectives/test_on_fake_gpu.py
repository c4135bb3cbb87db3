"""A micro-batch's forward pass on a GPU that is not there: all tensors are on it, the host reads none, and kernels get
what they take. Numbers are tested on CPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.losses.contrastive import build_objective
from megahead.models.attention_backends import BACKENDS
from megahead.models.blocks import set_attention
from megahead.models.documents import Documents
from megahead.objectives.auxiliary import auxiliary_class, training_row_collator
from megahead.objectives.loader import StepLoader
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import Pretraining, build_parallel_model
from megahead.train.datasets import open_datasets
from support.cuda_rules import CUDA, fake_cuda
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text

pytest.importorskip("triton", reason="needs triton (the `test` extra, or torch for CUDA)")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU, beside tests/gpu")

BERT = {"family": "bert", "num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 63, "max_positions": 64}
MASKS = {"mask_token": 60, "cls_token": 61, "sep_token": 62}
ENCODER = {"model": BERT, "masking": MASKS}
MODERNBERT = {"model": BERT | {"family": "modernbert", "local_window": 8}, "masking": MASKS}


def first_micro_batch(config: RunConfig, *, static_shapes: bool) -> MicroBatch:
    """As the loader prepares it for CUDA, but in memory that is not pinned."""
    datasets, plan = open_datasets(config, Group()), RunPlan.of(config, 1, "cuda")
    loader = StepLoader(
        datasets.samples,
        build_objective(config.objective, config.model.vocab_size, datasets.token_counts),
        config.data,
        config.batch,
        Group(),
        group_samples=plan.group_samples(),
        device=CUDA,
        half_precision=True,
        static_shapes=static_shapes,
        collator=training_row_collator(config, datasets.train),
        auxiliary=auxiliary_class(config.objective.auxiliary_or_empty()),
    )
    return loader.step(0).micro_batches[0]


def fake_module(config: RunConfig, dtype: torch.dtype, attend: Callable[..., Tensor]) -> Pretraining:
    module = build_parallel_model(config, Group(), CUDA)
    for parameter in module.parameters():
        parameter.data = torch.empty(parameter.shape, dtype=dtype, device=CUDA)
    set_attention(module, attend)
    return module


def attention_dtypes(group: Group, config: RunConfig, autocast: bool) -> set[torch.dtype]:
    """The dtypes of queries, keys and values in a micro-batch's forward pass."""
    dtypes = set[torch.dtype]()

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout: float, causal: bool) -> Tensor:
        dtypes.update((q.dtype, k.dtype, v.dtype))
        return BACKENDS["varlen"].attend(q, k, v, documents, dropout, causal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
        patch.setattr("megahead.losses.triton_kernel._softmax_kernel", defaultdict(lambda: lambda *_, **__: None))
        unsupported_reason = RunPlan.of(config, 1, "cuda").graphs_unsupported_reason()
        micro = first_micro_batch(config, static_shapes=not unsupported_reason)
        assert micro.buffer is not None
        with fake_cuda(autocast=autocast) as mode:
            module = fake_module(config, torch.float32 if autocast else torch.bfloat16, attend)
            loss = module(micro.with_buffer(mode.from_tensor(micro.buffer).to(CUDA)))
    assert (loss.device, loss.dtype, loss.shape) == (CUDA, torch.float32, ())
    return dtypes


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"bias": "corrected", "max_candidates": 12, "negatives": 4}},
        {"objective": {"name": "vanilla", "output_bias": True}},
        {"objective": {"score": "harmonic"}, "model.family": "gpt2", "model.max_positions": 32},
        {
            "model.family": "llama",
            "model.qk_norm": True,
            "model.num_key_heads": 2,
            "objective.learned_temperature": True,
        },
        {"model.family": "gemma3", "model.local_window": 8, "objective.candidates": "own"},
        {"objective": {"multi_token": {"heads": 2}, "group_samples": 1}, "data.boundary_targets": False},
        ENCODER | {"objective.name": "vanilla"},
        MODERNBERT | {"masking": MASKS | {"masks_from_layer": 1}},
        MODERNBERT | {"objective": {"replaced_tokens": {}}},
        ENCODER | {"objective": {"retromae": {"bag_weight": 1.0}, "score": "cosine"}},
        ENCODER | {"objective": {"tsdae": {"deletion_rate": 0.5}}},
        ENCODER | {"objective": {"phrases": {"group_samples": 2}, "group_samples": 2}},
    ],
    ids=str,
)
def test_a_forward_pass_stays_on_the_gpu(tmp_path: Path, changes: dict[str, Any], autocast: bool) -> None:
    """In bf16 at ZeRO 1, and by autocast at ZeRO 0; with static shapes where graphs are captured."""
    write_text(tmp_path)
    stage = {"zero_optimization": {"stage": 0 if autocast else 1}}
    config = small_config(tmp_path, {"engine.precision": "bf16", "engine.deepspeed": stage} | changes)
    assert on_ranks(1, attention_dtypes, config, autocast) == [{torch.bfloat16}]
