"""The optimizer's update is AdamW's, as its paper states it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megahead.config.training import OptimizerConfig
from megahead.optim import build_optimizer

CONFIG = OptimizerConfig(learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)


def formula(weight: Tensor, gradients: list[Tensor], rates: list[float], decay: float) -> Tensor:
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for count, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        step = (mean / (1 - 0.8**count)) / ((square / (1 - 0.9**count)).sqrt() + 1e-6)
        weight = weight - rate * step - rate * decay * weight
    return weight


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_updates_equal_the_formula_under_a_changing_rate(device):
    torch.manual_seed(0)
    layer = nn.Linear(5, 3).to(device)
    start = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    gradients = {name: [torch.randn_like(value) for _ in range(4)] for name, value in start.items()}
    rates = [0.001, 0.01, 0.005, 0.0]
    optimizer = build_optimizer(layer, CONFIG)
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, parameter in layer.named_parameters():
            parameter.grad = gradients[name][step].float()
        optimizer.step()
    for name, parameter in layer.named_parameters():
        expected = formula(start[name], gradients[name], rates, 0.3 if name == "weight" else 0.0)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_settings_reach_every_group():
    optimizer = build_optimizer(nn.Linear(5, 3), CONFIG)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), 1e-6)


@pytest.mark.gpu
def test_cuda_equals_cpu():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 3), nn.Linear(5, 3).cuda()]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        build_optimizer(layer, CONFIG).step()
    torch.testing.assert_close(layers[1].weight.cpu(), layers[0].weight)
