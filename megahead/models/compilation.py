"""`torch.compile` block by block: what is compiled for the first serves all, which differ in weights alone."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn


class CompiledBlocks:
    """Calls blocks compiled; after the first failure, which gives a warning, as they are.

    Every new shape is compiled for. Results differ from those of the plain block by rounding, and dropout draws other
    numbers.
    """

    def __init__(self, **options: Any) -> None:
        """`options`: of `torch.compile`."""
        self.obstacle = ""
        if "backend" not in options:  # torch 2.13 gives two bf16 sums of one loop the same name in C++
            options["options"] = {"cpp.max_horizontal_fusion_size": 1}
        self._compiled = torch.compile(_call, dynamic=False, **options)
        settings: Any = importlib.import_module("torch._functorch.config")
        settings.force_non_lazy_backward_lowering = True  # else a backward that cannot be compiled fails when it runs
        self._failure = torch._dynamo.exc.TorchDynamoException  # imported by now, and slow to import before

    def __call__(self, block: nn.Module, *inputs: object) -> Tensor:
        """`block(*inputs)`."""
        if not self.obstacle:
            try:
                output: Tensor = self._compiled(block, *inputs)
                return output
            except self._failure as error:
                self.obstacle = _summary(str(error))
                warnings.warn(f"blocks are not compiled: {self.obstacle}", stacklevel=2)
        return _call(block, *inputs)


def _summary(error: str) -> str:
    """The first line of a long message, and the first after it that names an error."""
    first, *rest = error.splitlines()
    return " ".join([first, *[line for line in rest if "error" in line.lower()][:1]])


def _call(block: nn.Module, *inputs: object) -> Tensor:
    output: Tensor = block(*inputs)
    return output
