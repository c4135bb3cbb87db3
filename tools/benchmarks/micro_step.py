"""What a micro-step takes at each ZeRO stage with the settings of GPUs, counted on a CPU: see kernel_figures.py.

So few tokens are read that what is moved belongs to parameters: their weights, gradients, and sums of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.engines import one_micro_batch
from benchmarks.memory import in_child
from megahead.config.loading import config_from_dict
from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.estimate import count_parameters
from megahead.objectives.pretraining import assemble, fill_, first_weights
from megahead.optim import build_optimizer
from megahead.report.tables import to_rich
from megahead.terminal import terminal

SETTINGS = Path(__file__).resolve().parents[2] / "configs/deepspeed"
CPU = torch.device("cpu")
NOTHING = ("empty", "new_empty", "detach", "alias", "_local_scalar_dense", "promote_types", "set_", "_unsafe_view")
"""Operations that compute nothing and move nothing."""

WRITE_ALONE = ("zero_", "fill_", "zeros", "ones", "full", "new_zeros", "zeros_like", "arange")
OF_ROWS = ("embedding", "index", "index_select", "gather")
"""They read as many numbers as they write, and not the whole of what they look up in."""

ADDED_TO_ROWS = ("index_add", "index_add_")
"""They read what is added, and read and write as much of what they add to: in place, but while they are counted."""


class Counted(TorchDispatchMode):
    """Operations, and bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0

    def found(self) -> tuple[int, int]:
        return self.operations, self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(NOTHING):
            self.operations += 1
            self.bytes += _moved(name, args, result)
        return result


LATER = {"bf16": {"immediate_grad_update": False}}
"""What DeepSpeed does at stage 1 unless it is told otherwise: gradients become sums at the end of a micro-step."""


def print_micro_steps() -> None:
    """The table."""
    terminal(width=160).print(to_rich(list(micro_steps())))


def micro_steps() -> Iterator[dict[str, object]]:
    """A line for the model alone, and for each stage."""
    works: dict[str, Callable[[], Counted]] = {"none, the model alone": alone}
    works |= {str(stage): partial(in_engine, stage) for stage in range(4)}
    works |= {"1, as DeepSpeed has it": partial(in_engine, 1, LATER)}
    for name, work in works.items():
        operations, moved = in_child(lambda work=work: work().found())  # type: ignore[misc]
        yield {
            "ZeRO": name,
            "operations": operations,
            "bytes a parameter": f"{moved / count_parameters(_config(0).model).total:.1f}",
        }


def alone() -> Counted:
    """Forward and backward of a model in bf16."""
    config = _config(0)
    module = assemble(config, Group(), CPU)
    fill_(module, Group(), first_weights(config))
    module.bfloat16()
    counted = Counted()
    with counted:
        module(one_micro_batch(config, 0)).backward()
    return counted


def in_engine(stage: int, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Counted:
    """The second of three micro-steps of a step, in bf16 on one data rank. `changes`: of DeepSpeed's settings."""
    from megahead.engine.engine import Engine

    config, mesh = _config(stage), Mesh.build(Group.world())
    settings, module = deepspeed_config(config, 1, "cuda"), assemble(config, Group(), CPU)
    for section, values in (changes or {}).items():
        settings[section] |= values
    optimizer, weights = build_optimizer(module, config.optimizer), first_weights(config)
    engine = Engine(module, optimizer=optimizer, config=settings, mesh=mesh, device=CPU, weights=weights)
    micro = one_micro_batch(config, 0)
    engine.micro_step(micro)
    counted = Counted()
    with counted:
        engine.micro_step(micro)
    return counted


def _config(stage: int) -> RunConfig:
    return config_from_dict(
        {
            "name": "micro-step",
            "model": {"num_layers": 6, "hidden_size": 256, "num_heads": 4, "vocab_size": 512},
            "data": {"train": "", "sequence_length": 4},
            "batch": {"global_size": 3, "micro_size": 1},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 1},
            "engine": {"device": "cpu", "precision": "bf16", "deepspeed": str(SETTINGS / f"zero{stage}.json")},
        }
    )


def _moved(name: str, given: Any, result: Any) -> int:
    """Bytes that an operation reads and writes."""
    if name in ADDED_TO_ROWS:
        return 3 * _bytes(given[3])
    read = 0 if name in WRITE_ALONE else _bytes(given[1]) if name == "copy_" else _bytes(given)
    return _bytes(result) + (_bytes(result) if name in OF_ROWS else read)


def _bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
