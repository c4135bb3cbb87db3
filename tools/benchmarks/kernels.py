"""What tools/kernel_figures.py computes of the loss's kernel and of micro-steps, without a GPU.

A micro-step reads so few tokens that what is moved belongs to parameters: weights, gradients, and sums of gradients.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.command import config_of, report
from benchmarks.engines import SETTINGS, build, one_micro_batch
from benchmarks.timing import in_child
from megahead.config.objective import GPU_CHUNKS
from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.estimate import count_parameters
from megahead.objectives.pretraining import assemble, fill_, initial_weights

WAYS = {
    "sums and residuals": {"lse": "constexpr", "residuals": "*bf16"},
    "sums (evaluation, split)": {"lse": "constexpr", "residuals": "constexpr"},
    "residuals (split)": {"lse": "*fp32", "residuals": "*bf16"},
}
# Assumed of an H100: operations a second of large bf16 products; bytes a second of its memory
PRODUCTS, MEMORY = 650e12, 3.35e12
# Seconds that an H200's host took to ask for the kernels of a loss and of each of its chunks; measured
LOSS_ASKED, CHUNK_ASKED = 1.0e-3, 0.2e-3
Line = dict[str, object]


def print_figures() -> None:
    """Both tables of the kernel."""
    sizes = ((16384, 4608, 512), (16384, 4608, 1024), (16384, 4608, 2048), (8192, 3072, 5120), (16384, 50304, 512))
    report(
        [compiled(capability, way) for capability in (80, 90, 100) for way in WAYS], [summed_up(*one) for one in sizes]
    )


def compiled(capability: int, way: str) -> Line:
    """The kernel in bf16 with a bias, with arguments aligned as they are in training: all but the number of candidates,
    which is a multiple of nothing for a vocabulary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megahead.losses import triton_kernel as row_kernel

    pointers = {"scores": "*fp32", "sums": "*fp32", "target": "*i64", "bias": "*fp32", "target_bias": "constexpr"}
    numbers = {"scale": "fp32", "count": "i32", "width": "i32", "stride": "i32", "BLOCK": "constexpr"}
    kinds = pointers | numbers | WAYS[way]
    types = {name: kinds[name] for name in row_kernel._softmax_kernel.arg_names}
    constants: dict[tuple[int, ...], int | None] = {}
    attributes = {}
    for place, (name, kind) in enumerate(types.items()):
        if kind == "constexpr":
            constants[place,] = row_kernel.BLOCK if name == "BLOCK" else None
        elif name != "width" and kind != "fp32":
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(row_kernel._softmax_kernel, types, constants, attributes)
    options = {"num_warps": row_kernel.WARPS}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled, shared = resources(kernel.asm["cubin"])
    blocks = min(65536 // (-(-registers // 8) * 8 * 32 * row_kernel.WARPS), 64 // row_kernel.WARPS)
    found: Line = {"sm": capability, "way": way, "registers": registers, "spilled": spilled, "shared": shared}
    moved = {name: moved_at_once(what, kernel.asm["ptx"]) for name, what in (("load", "ld"), ("store", "st"))}
    return found | {"blocks": blocks} | moved


def moved_at_once(what: str, assembly: str) -> int:
    """Most bytes that an instruction of PTX moves from memory (`ld`) or to it (`st`) for one thread."""
    found = re.findall(rf"{what}\.global(?:\.[a-z:0-9]+?)*?(?:\.v(\d))?\.[a-z](\d+)\b", assembly)
    return max(int(count or 1) * int(bits) // 8 for count, bits in found)


def resources(binary: bytes) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack and local memory, bytes of shared memory."""
    import triton

    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([reader, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", told.stdout)}
    return found["REG"], found["STACK"] + found["LOCAL"], found["SHARED"]


def summed_up(outputs: int, candidates: int, features: int) -> Line:
    """One loss, forward and backward, on one rank in bf16."""
    chunks = -(-outputs // GPU_CHUNKS.outputs(outputs, candidates, 4))
    kernels = 5 * chunks + 10  # three products, the row step, a difference; then biases, sums and scaling
    operations = 6 * outputs * candidates * features
    row_bytes = 18 * outputs * candidates  # at most: scores and residuals written and read twice
    memory = 2 * outputs * features * 4 + 8 * candidates * features * chunks + 12 * candidates * features
    products, rows, host = operations / PRODUCTS, row_bytes / MEMORY, LOSS_ASKED + CHUNK_ASKED * chunks
    return {
        "N": f"{outputs:,}", "U": f"{candidates:,}", "D": f"{features:,}", "chunks": chunks, "kernels": kernels,
        "TFLOP": f"{operations / 1e12:.2f}", "products ms": f"{products * 1e3:.2f}", "rows ms": f"{rows * 1e3:.2f}",
        "memory MB": f"{memory / 1e6:,.0f}", "memory ms": f"{memory / MEMORY * 1e3:.2f}",
        "host ms": f"{host * 1e3:.2f}", "products' share": f"{products / max(products + rows, host):.0%}",
    }  # fmt: skip


CPU = torch.device("cpu")
# Operations that compute nothing and move nothing
NOTHING = ("empty", "new_empty", "detach", "alias", "_local_scalar_dense", "promote_types", "set_", "_unsafe_view")
WRITE_ALONE = ("zero_", "fill_", "zeros", "ones", "full", "new_zeros", "zeros_like", "arange")
# They read as many numbers as they write, and not the whole of what they look up in
OF_ROWS = ("embedding", "index", "index_select", "gather")
# They read what is added, and read and write as much of what they add to: in place, but while they are counted
ADDED_TO_ROWS = ("index_add", "index_add_")


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


# What DeepSpeed does at stage 1 unless it is configured otherwise: gradients become sums at the end of a micro-step
LATER = {"bf16": {"immediate_grad_update": False}}


def print_micro_steps() -> None:
    """A line for the model alone, and for each stage."""
    works: dict[str, Callable[[], Counted]] = {"none, the model alone": alone}
    works |= {str(stage): partial(in_engine, stage) for stage in range(4)}
    works |= {"1, as DeepSpeed has it": partial(in_engine, 1, LATER)}
    lines, parameters = [], count_parameters(_config(0).model).total
    for name, work in works.items():
        operations, moved = in_child(lambda work=work: work().found())  # type: ignore[misc]
        lines.append({"ZeRO": name, "operations": operations, "bytes a parameter": f"{moved / parameters:.1f}"})
    report(lines)


def alone() -> Counted:
    """Forward and backward of a model in bf16."""
    config = _config(0)
    module = assemble(config, Group(), CPU)
    fill_(module, Group(), initial_weights(config))
    module.bfloat16()
    counted = Counted()
    with counted:
        module(one_micro_batch(config, 0)).backward()
    return counted


def in_engine(stage: int, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Counted:
    """The second of three micro-steps of a step, in bf16 on one data rank. `changes`: of DeepSpeed's settings."""
    config = _config(stage)
    settings = deepspeed_config(config, 1, "cuda")
    for section, values in (changes or {}).items():
        settings[section] |= values
    engine = build(config, Mesh.build(Group.world()), CPU, settings)
    micro = one_micro_batch(config, 0)
    engine.micro_step(micro)
    counted = Counted()
    with counted:
        engine.micro_step(micro)
    return counted


def _config(stage: int) -> RunConfig:
    """With steps of several micro-batches."""
    shape = {"num_layers": 6, "hidden_size": 256, "num_heads": 4, "vocab_size": 512}
    engine = "engine.device=cpu", "engine.precision=bf16", f"engine.deepspeed={SETTINGS / f'zero{stage}.json'}"
    return config_of(shape, 1, 4, "batch.global_size=3", *engine)


def _moved(name: str, given: Any, result: Any) -> int:
    """Bytes that an operation reads and writes."""
    if name in ADDED_TO_ROWS:
        return 3 * _bytes(given[3])
    read = 0 if name in WRITE_ALONE else _bytes(given[1]) if name == "copy_" else _bytes(given)
    return _bytes(result) + (_bytes(result) if name in OF_ROWS else read)


def _bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
