"""The log's share of the peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megahead.config.plan import RunPlan
from megahead.estimate import training_flops
from megahead.train.step import Utilization, peak_flops
from support.small_run import small_config


def test_peaks_by_the_names_that_devices_have() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H200 NVL", "bf16") == 835e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp16") == 312e12
    assert peak_flops("NVIDIA GeForce RTX 4090", "bf16") == 165e12
    assert peak_flops("NVIDIA H200", "fp32") is None
    assert peak_flops("cpu", "bf16") is None


def test_share_of_the_peak(tmp_path: Path) -> None:
    config = small_config(tmp_path, {})
    per_token = training_flops(config.model, config.data.sequence_length, 50).total
    on_one = Utilization.for_device(torch.device("cpu"), RunPlan.of(config))
    told = replace(on_one, devices=4, device_peak=per_token * 1000).metrics(tokens_per_second=2000, candidates=50)
    assert told == {"flops_per_second": pytest.approx(per_token * 500), "mfu": pytest.approx(0.5)}


def test_a_cpu_has_no_stated_peak_and_vanilla_scores_every_row(tmp_path: Path) -> None:
    config = small_config(tmp_path, {"objective.name": "vanilla"})
    told = Utilization.for_device(torch.device("cpu"), RunPlan.of(config)).metrics(1.0, 0)
    rows = config.model.padded_vocab_size()
    flops = training_flops(config.model, config.data.sequence_length, rows).total
    assert told == {"flops_per_second": pytest.approx(flops)}


def test_an_encoder_scores_the_masked_tokens_only(tmp_path: Path) -> None:
    model = {"family": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 60}
    masking = {"mask_token": 57, "cls_token": 58, "sep_token": 59}
    config = small_config(tmp_path, {"model": model, "masking": masking})
    told = Utilization.for_device(torch.device("cpu"), RunPlan.of(config)).metrics(1.0, 50)["flops_per_second"]
    length = config.data.sequence_length
    assert told == pytest.approx(
        training_flops(config.model, length, 50, targets=3).total
    )  # 15 % of the 22 between [CLS] and [SEP]
    assert told < 0.8 * training_flops(config.model, length, 50).total
