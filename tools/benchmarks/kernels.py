"""The figures of tools/kernel_figures.py: the loss kernel and micro-steps, without a GPU.

A micro-step reads so few tokens that almost all bytes moved are weights, gradients and gradient sums.
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

from benchmarks.command import build_config, report
from benchmarks.engines import DEEPSPEED_CONFIGS, build_engine, zipf_micro_batch
from benchmarks.timing import run_in_child
from megahead.config.objective import GPU_CHUNKS
from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.estimate import count_parameters
from megahead.objectives.pretraining import build_parallel_model, initial_weights, load_weights_

KERNEL_ARGUMENTS = {
    "sums and residuals": {"lse": "constexpr", "residuals": "*bf16"},
    "sums (evaluation, split)": {"lse": "constexpr", "residuals": "constexpr"},
    "residuals (split)": {"lse": "*fp32", "residuals": "*bf16"},
}
# Assumed of an H100: FLOP/s of large bf16 products, and bytes a second of its memory
MATMUL_FLOPS, MEMORY_BANDWIDTH = 650e12, 3.35e12
# Measured on an H200: the host's seconds to launch the kernels of a loss, and of each of its chunks
LOSS_LAUNCH_SECONDS, CHUNK_LAUNCH_SECONDS = 1.0e-3, 0.2e-3
Row = dict[str, object]


def print_figures() -> None:
    """Prints the two tables of the kernel."""
    sizes = ((16384, 4608, 512), (16384, 4608, 1024), (16384, 4608, 2048), (8192, 3072, 5120), (16384, 50304, 512))
    report(
        [kernel_row(capability, variant) for capability in (80, 90, 100) for variant in KERNEL_ARGUMENTS],
        [loss_row(*one) for one in sizes],
    )


def kernel_row(capability: int, variant: str) -> Row:
    """Compiles the kernel for bf16 with a bias; returns its resources.

    Arguments are aligned as in training: all but the number of candidates, which may be any vocabulary size."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megahead.losses import triton_kernel

    pointers = {"scores": "*fp32", "sums": "*fp32", "target": "*i64", "bias": "*fp32", "target_bias": "constexpr"}
    scalars = {"scale": "fp32", "count": "i32", "width": "i32", "stride": "i32", "BLOCK": "constexpr"}
    type_by_name = pointers | scalars | KERNEL_ARGUMENTS[variant]
    types = {name: type_by_name[name] for name in triton_kernel._softmax_kernel.arg_names}
    constants: dict[tuple[int, ...], int | None] = {}
    attributes = {}
    for index, (name, type_name) in enumerate(types.items()):
        if type_name == "constexpr":
            constants[index,] = triton_kernel.BLOCK if name == "BLOCK" else None
        elif name != "width" and type_name != "fp32":
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(triton_kernel._softmax_kernel, types, constants, attributes)
    options = {"num_warps": triton_kernel.WARPS}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled, shared = resources(kernel.asm["cubin"])
    blocks = min(65536 // (-(-registers // 8) * 8 * 32 * triton_kernel.WARPS), 64 // triton_kernel.WARPS)
    row: Row = {"sm": capability, "way": variant, "registers": registers, "spilled": spilled, "shared": shared}
    access_bytes = {
        name: max_access_bytes(instruction, kernel.asm["ptx"])
        for name, instruction in (("load", "ld"), ("store", "st"))
    }
    return row | {"blocks": blocks} | access_bytes


def max_access_bytes(instruction: str, assembly: str) -> int:
    """The most bytes that one `ld` or `st` instruction of PTX `assembly` moves for a thread."""
    accesses = re.findall(rf"{instruction}\.global(?:\.[a-z:0-9]+?)*?(?:\.v(\d))?\.[a-z](\d+)\b", assembly)
    return max(int(count or 1) * int(bits) // 8 for count, bits in accesses)


def resources(binary: bytes) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack and local memory, bytes of shared memory."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        result = subprocess.run(
            [cuobjdump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", result.stdout)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"], usage["SHARED"]


def loss_row(outputs: int, candidates: int, features: int) -> Row:
    """Estimates one loss, forward and backward, on one rank in bf16."""
    chunks = -(-outputs // GPU_CHUNKS.outputs_per_chunk(outputs, candidates, 4))
    kernels = 5 * chunks + 10  # three products, the row step, a difference; then biases, sums and scaling
    flops = 6 * outputs * candidates * features
    row_bytes = 18 * outputs * candidates  # at most: scores and residuals written and read twice
    num_bytes = 2 * outputs * features * 4 + 8 * candidates * features * chunks + 12 * candidates * features
    matmul_s, row_s = flops / MATMUL_FLOPS, row_bytes / MEMORY_BANDWIDTH
    host_s = LOSS_LAUNCH_SECONDS + CHUNK_LAUNCH_SECONDS * chunks
    return {
        "N": f"{outputs:,}", "U": f"{candidates:,}", "D": f"{features:,}", "chunks": chunks, "kernels": kernels,
        "TFLOP": f"{flops / 1e12:.2f}", "products ms": f"{matmul_s * 1e3:.2f}", "rows ms": f"{row_s * 1e3:.2f}",
        "memory MB": f"{num_bytes / 1e6:,.0f}", "memory ms": f"{num_bytes / MEMORY_BANDWIDTH * 1e3:.2f}",
        "host ms": f"{host_s * 1e3:.2f}", "products' share": f"{matmul_s / max(matmul_s + row_s, host_s):.0%}",
    }  # fmt: skip


CPU = torch.device("cpu")
# Prefixes of operations that compute nothing and move nothing
FREE_OPERATIONS = (
    *("empty", "new_empty", "detach", "alias"),
    *("_local_scalar_dense", "promote_types", "set_", "_unsafe_view"),
)
WRITE_ONLY = ("zero_", "fill_", "zeros", "ones", "full", "new_zeros", "zeros_like", "arange")
# They read only the rows that they look up
ROW_LOOKUPS = ("embedding", "index", "index_select", "gather")
# They read the addends, and read and write the rows they add to: in place, except under the counter
ROW_ADDITIONS = ("index_add", "index_add_")


class OperationCounter(TorchDispatchMode):
    """Counts operations, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0

    def totals(self) -> tuple[int, int]:
        return self.operations, self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.startswith("_foreach") and name.endswith("_"):  # a kernel for each tensor of two dtypes
            self.operations += len(args[0])
            self.bytes += _moved_bytes(name, args, args[0])
        elif not func.is_view and not name.startswith(FREE_OPERATIONS):
            self.operations += 1
            self.bytes += _moved_bytes(name, args, result)
        return result


# DeepSpeed at stage 1 adds each gradient to its sum by a hook in the backward pass
IMMEDIATE_GRADIENT_SUMS = {"bf16": {"immediate_grad_update": True}}


def print_micro_steps() -> None:
    """Prints a row for the model without an engine, and one for each ZeRO stage."""
    counts: dict[str, Callable[[], OperationCounter]] = {"none, the model alone": count_model_operations}
    counts |= {str(stage): partial(count_engine_operations, stage) for stage in range(4)}
    counts |= {"1, immediate sums": partial(count_engine_operations, 1, IMMEDIATE_GRADIENT_SUMS)}
    rows, parameters = [], count_parameters(_config(0).model).total
    for name, count in counts.items():
        operations, moved_bytes = run_in_child(lambda count=count: count().totals())  # type: ignore[misc]
        rows.append({"ZeRO": name, "operations": operations, "bytes a parameter": f"{moved_bytes / parameters:.1f}"})
    report(rows)


def count_model_operations() -> OperationCounter:
    """Counts forward and backward of a model in bf16."""
    config = _config(0)
    module = build_parallel_model(config, Group(), CPU)
    load_weights_(module, Group(), initial_weights(config))
    module.bfloat16()
    counter = OperationCounter()
    with counter:
        module(zipf_micro_batch(config, 0)).backward()
    return counter


def count_engine_operations(stage: int, changes: Mapping[str, Mapping[str, Any]] | None = None) -> OperationCounter:
    """Counts the second of three micro-steps, in bf16 on one data rank; `changes` update DeepSpeed's config."""
    config = _config(stage)
    settings = deepspeed_config(config, 1, "cuda")
    for section, values in (changes or {}).items():
        settings.setdefault(section, {}).update(values)
    engine = build_engine(config, Mesh.build(Group.world()), CPU, settings)
    micro = zipf_micro_batch(config, 0)
    engine.micro_step(micro)
    counter = OperationCounter()
    with counter:
        engine.micro_step(micro)
    return counter


def _config(stage: int) -> RunConfig:
    """A config whose steps have several micro-batches."""
    shape = {"num_layers": 6, "hidden_size": 256, "num_heads": 4, "vocab_size": 512}
    engine = "engine.device=cpu", "engine.precision=bf16", f"engine.deepspeed={DEEPSPEED_CONFIGS / f'zero{stage}.json'}"
    return build_config(shape, 1, 4, "batch.global_size=3", *engine)


def _moved_bytes(name: str, arguments: Any, result: Any) -> int:
    """Bytes that an operation reads and writes."""
    if name in ROW_ADDITIONS:
        return 3 * _total_bytes(arguments[3])
    read_bytes = 0 if name in WRITE_ONLY else _total_bytes(arguments[1]) if name == "copy_" else _total_bytes(arguments)
    return _total_bytes(result) + (_total_bytes(result) if name in ROW_LOOKUPS else read_bytes)


def _total_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
