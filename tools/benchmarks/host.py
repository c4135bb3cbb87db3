"""The host's part of a micro-batch: the trained module and the engine against a plain loop.

The model is so small that computation is negligible. The host's time to dispatch operators remains: a fast GPU waits
for it. CPU tensors take the code paths of CUDA tensors, and the Triton kernel is not launched, so results are
meaningless. All variants alternate in one process.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.command import build_config
from benchmarks.engines import build_engine
from benchmarks.rows import build_run_objective, token_rows
from benchmarks.rows import micro_batch as build_micro_batch
from benchmarks.timing import run_interleaved
from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.losses import fused_softmax
from megahead.models import layers
from megahead.models.blocks import set_attention
from megahead.objectives import micro_batch
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import Pretraining, build_parallel_model, initial_weights, load_weights_

LAYERS, HIDDEN, HEADS, VOCABULARY, TOKENS = 6, 16, 2, 64, 4
CPU = torch.device("cpu")
UNCOUNTED = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "set_", "lift_fresh", "promote_types")


def time_host(rounds: int) -> list[dict[str, object]]:
    """A line for each variant: its CPU time, the ratio of the fastest to the plain loop's, and its operators."""
    torch.set_num_threads(1)
    with gpu_code_paths():
        return _time_variants(rounds)


def _time_variants(rounds: int) -> list[dict[str, object]]:
    config = build_config(
        {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_heads": HEADS, "vocab_size": VOCABULARY},
        1,
        TOKENS,
        "engine.precision=bf16",
        'engine.deepspeed={"zero_optimization": {"stage": 1}}',
    )
    variants = {"plain": plain_step(), "module": module_step(config), "engine": engine_step(config)}
    gc.collect()
    gc.disable()
    taken = run_interleaved([lambda _, step=step: cpu_seconds(step) for step in variants.values()], rounds, warm_up=10)  # type: ignore[misc]
    gc.enable()
    lines, fastest = [], [min(seconds) for seconds in zip(*taken, strict=True)]
    for place, (name, step) in enumerate(variants.items()):
        with CountedOperators() as operators:
            step()
        milliseconds = [1e3 * seconds[place] for seconds in taken]
        lines.append(
            {
                "": name,
                "fastest ms": f"{min(milliseconds):.2f}",
                "median ms": f"{median(milliseconds):.2f}",
                "ratio": f"{fastest[place] / fastest[0]:.2f}",
                "operators": operators.count.total(),
            }
        )
    return lines


def cpu_seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


class CountedOperators(TorchDispatchMode):
    """Counts what is dispatched inside, but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(UNCOUNTED):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


class PlainDecoder(nn.Module):
    """GPT-NeoX's blocks without anything that a run may want: documents, dropout, ranks, recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks: Any = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(HIDDEN),
                    "qkv": nn.Linear(HIDDEN, 3 * HIDDEN),
                    "output": nn.Linear(HIDDEN, HIDDEN),
                    "mlp_norm": nn.LayerNorm(HIDDEN),
                    "up": nn.Linear(HIDDEN, 4 * HIDDEN),
                    "down": nn.Linear(4 * HIDDEN, HIDDEN),
                }
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(HIDDEN)
        angles = torch.arange(TOKENS)[:, None] * torch.ones(1, 1)
        self.cos = torch.cat([angles.cos()] * 2, -1).bfloat16()
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).bfloat16()

    def forward(self, ids_BT: Tensor) -> Tensor:
        """[N, D]: hidden states."""
        x_BTD = self.embedding(ids_BT)
        for block in self.blocks:
            qkv = block["qkv"](block["norm"](x_BTD)).view(*ids_BT.shape, 3, HEADS, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            heads = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
            attended = block["output"](heads.transpose(1, 2).flatten(2))
            x_BTD = x_BTD + attended + block["down"](F.gelu(block["up"](block["mlp_norm"](x_BTD))))
        hidden_ND: Tensor = self.norm(x_BTD).flatten(0, 1)
        return hidden_ND

    def _rotated(self, x_BHTd: Tensor) -> Tensor:
        turned, rest = x_BHTd[..., :2], x_BHTd[..., 2:]
        return torch.cat([turned * self.cos + turned.roll(1, -1) * self.sin, rest], -1)


def plain_step() -> Callable[[], None]:
    """Forward and backward of the paper's N x N form."""
    decoder, rows = PlainDecoder().bfloat16(), torch.randint(0, VOCABULARY, (1, TOKENS + 1))
    parameters = list(decoder.parameters())

    def step() -> None:
        clear(parameters)
        targets_N = rows[:, 1:].flatten()
        scores_NN = decoder(rows[:, :-1]) @ decoder.embedding.weight[targets_N].T
        F.cross_entropy(scores_NN, torch.arange(len(targets_N))).backward()

    return step


def module_step(config: RunConfig) -> Callable[[], None]:
    """The same by the module that a run trains."""
    module = build_parallel_model(config, Group(), CPU)
    load_weights_(module, Group(), initial_weights(config))
    module.bfloat16()
    set_attention(module, dense_attention)
    micro, parameters = prepared(config), list(module.parameters())

    def step() -> None:
        clear(parameters)
        module(micro.to(CPU)).backward()

    return step


def engine_step(config: RunConfig) -> Callable[[], None]:
    """The same by the engine, which adds gradients up; never the last of a step's micro-batches."""
    settings = deepspeed_config(config, 1, "cuda") | {"gradient_accumulation_steps": 10**9}
    settings["train_batch_size"] = 10**9
    engine = build_engine(config, Mesh.build(Group.world()), CPU, settings)
    assert isinstance(engine.module, Pretraining)
    set_attention(engine.module, dense_attention)
    micro = prepared(config)

    def step() -> None:
        engine.micro_step(micro.to(CPU))

    return step


def clear(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def prepared(config: RunConfig) -> MicroBatch:
    """A micro-batch as the loader gives it."""
    (row,) = token_rows(config, None, 1)
    with mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor):
        return build_micro_batch(config, build_run_objective(config, [row]), row).prepare_for(torch.device("cuda"))


def dense_attention(q: Tensor, k: Tensor, v: Tensor, documents: object, dropout: float, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _NotLaunched:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


@contextmanager
def gpu_code_paths() -> Iterator[None]:
    """Inside, CPU tensors take the code paths of CUDA tensors, without launching the Triton kernel."""
    from megahead.losses import triton_kernel

    class WithoutKernel(triton_kernel.TritonChunkSoftmax):
        def matmul_(self, result: Tensor, left: Tensor, right: Tensor) -> None:
            torch.mm(left, right, out=result if result.dtype == left.dtype else None)

        def add_matmul_(self, total: Tensor, left: Tensor, right: Tensor) -> None:
            torch.mm(left, right)

    with (
        mock.patch.object(fused_softmax, "supports_kernel", return_value=True),
        mock.patch.object(triton_kernel, "_softmax_kernel", new=_NotLaunched()),
        mock.patch.object(triton_kernel, "TritonChunkSoftmax", WithoutKernel),
        mock.patch.object(
            micro_batch, "CANDIDATE_MULTIPLE", 16
        ),  # 512 candidates take as long to compute as to dispatch
        mock.patch.object(layers, "layer_norm", new=_layer_norm),
        mock.patch.object(layers, "look_up", F.embedding),
        torch.backends.mkldnn.flags(enabled=False),
    ):
        yield
