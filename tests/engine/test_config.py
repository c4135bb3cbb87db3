"""Settings that DeepSpeed refuses, or accepts but trains wrongly with, are refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megahead.distributed.group import Group, Mesh
from megahead.distributed.tensors import FullTensors
from megahead.engine.engine import Engine
from megahead.errors import ConfigError, UserError
from support.on_ranks import on_ranks
from support.small_engine import small_engine


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_half_precision_without_zero_is_refused_with_a_way_out(key: str) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    config = {"train_batch_size": 1, key: {"enabled": True}}
    with pytest.raises(ConfigError, match=f"at least 1 with {key}.enabled .* use stage 1"):
        Engine(
            module,
            optimizer=optimizer,
            config=config,
            mesh=Mesh(),
            device=torch.device("cpu"),
            weights=FullTensors(module.state_dict().__getitem__),
        )


def refused(group: Group, chosen: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        small_engine(group, 1, **chosen)
    return str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "because"),
    [
        ({"offload": True, "deepspeed": {"zero_force_ds_cpu_optimizer": True}}, "You are using ZeRO-Offload with"),
        ({"zero": {"sub_group_size": -1}}, "1 validation error for DeepSpeedZeroConfig sub_group_size"),
    ],
)
def test_what_deepspeed_says_of_its_json_is_told_in_a_sentence(chosen: dict[str, Any], because: str) -> None:
    (sentence,) = on_ranks(1, refused, chosen)
    assert sentence.startswith(f"`engine.deepspeed` must be what DeepSpeed accepts, but it reports: {because}")


def refused_nvme(group: Group) -> str:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder.is_compatible = lambda *_, **__: False  # as where libaio is missing
    with pytest.raises(ConfigError) as caught:
        small_engine(group, 3, zero={"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}})
    return str(caught.value)


def test_offloading_to_nvme_without_libaio_is_refused_before_weights_are_partitioned() -> None:
    (sentence,) = on_ranks(1, refused_nvme)
    assert sentence.startswith("`engine.deepspeed.zero_optimization.offload_optimizer.device` must be cpu on a machine")


def refused_fp16(group: Group) -> str:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: False
    return refused(group, {"precision": "fp16"})


def test_fp16_is_refused_where_the_device_has_none() -> None:
    (sentence,) = on_ranks(1, refused_fp16)
    assert sentence.startswith("`engine.precision` must be fp32 or bf16 on a device without arithmetic in fp16")
