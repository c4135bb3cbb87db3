"""The host's part of a micro-batch, beside a plain loop; and what a launch costs the host.

The model is so small that computation is negligible. The host's time to dispatch operators remains: a fast GPU waits
for it. CPU tensors take the code paths of CUDA tensors, and the Triton kernel is not launched, so results are
meaningless. All variants alternate in one process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.command import build_config
from benchmarks.engines import build_engine
from benchmarks.kernels import OperationCounter
from benchmarks.rows import build_run_objective, token_rows
from benchmarks.rows import micro_batch as build_micro_batch
from benchmarks.timing import run_interleaved
from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.losses import fused_softmax
from megahead.losses.candidates import vocabulary_candidates
from megahead.losses.softmax import candidate_loss
from megahead.models import layers
from megahead.models.blocks import set_attention
from megahead.objectives import micro_batch
from megahead.objectives.micro_batch import MicroBatch
from megahead.objectives.pretraining import Pretraining, build_parallel_model, initial_weights, load_weights_

LAYERS, HIDDEN, HEADS, VOCABULARY, TOKENS = 6, 16, 2, 64, 4
CPU = torch.device("cpu")


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
        with OperationCounter() as counter:
            step()
        milliseconds = [1e3 * seconds[place] for seconds in taken]
        lines.append(
            {
                "": name,
                "fastest ms": f"{min(milliseconds):.2f}",
                "median ms": f"{median(milliseconds):.2f}",
                "ratio": f"{fastest[place] / fastest[0]:.2f}",
                "operators": counter.dispatched,
            }
        )
    return lines


def cpu_seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


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


# What a launch costs the host: an operator, the loss's Triton kernel, the replay of a CUDA graph.


CALLS = 1000  # of an operator a round; few enough for a device's queue of launches
SIZE = 16  # small: the device is done before the next launch


def time_launches(device_name: str, rounds: int) -> list[dict[str, object]]:
    """A line for each kind of launch: the host's microseconds a launch, and with the wait for the device."""
    device = torch.device(device_name)
    x = torch.zeros(SIZE, device=device)

    def add() -> None:
        for _ in range(CALLS):
            x.add_(1)

    kinds: dict[str, Callable[[], object]] = {f"operator, {CALLS:,} a call": add}
    if device.type == "cuda":
        kinds[f"graph of {CALLS:,} operators"] = _captured(add)
    kinds[f"loss of {SIZE} outputs, forward and backward"] = _loss_step(device)
    taken = run_interleaved([lambda _, call=call: _seconds(call, device) for call in kinds.values()], rounds, 3)  # type: ignore[misc]
    return [
        {
            "": name,
            "host, us a call": round(1e6 * median(host for host, _ in seconds), 1),
            "with the device": round(1e6 * median(both for _, both in seconds), 1),
        }
        for name, seconds in zip(kinds, zip(*taken, strict=True), strict=True)
    ]


def _seconds(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Of the host until the call returns, and until the device is done."""
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return returned - start, time.perf_counter() - start


def _loss_step(device: torch.device) -> Callable[[], None]:
    """The headless loss, by the Triton kernel on a GPU."""
    outputs_ND, rows_UD = (torch.randn(SIZE, SIZE, device=device, requires_grad=True) for _ in range(2))
    candidates = vocabulary_candidates(torch.arange(SIZE, device=device))

    def step() -> None:
        candidate_loss(outputs_ND, rows_UD, candidates).backward()

    return step


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], None] = graph.replay
    return replay
