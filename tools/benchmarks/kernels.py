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
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.command import build_config, report
from benchmarks.engines import DEEPSPEED_CONFIGS, build_engine, zipf_micro_batch
from benchmarks.timing import run_in_child
from megahead.config.plan import deepspeed_config
from megahead.config.run import RunConfig
from megahead.distributed.group import Group, Mesh
from megahead.estimate import count_parameters
from megahead.losses import fused_softmax
from megahead.losses.candidates import Candidates
from megahead.losses.softmax import candidate_loss
from megahead.objectives.pretraining import build_parallel_model, initial_weights, load_weights_

FINAL = {"lse": "*fp32", "known_score": "*fp32"}
KERNEL_ARGUMENTS = {
    "sums and residuals": {"scores": "*bf16", "residuals": "*bf16"},
    "sums (split)": {"scores": "*bf16"},
    "residuals (split)": {"scores": "*bf16", "residuals": "*bf16"} | FINAL,
    "sums (evaluation)": {"scores": "*fp32"},
    "sums and residuals (fp16)": {"scores": "*fp32", "residuals": "*fp16"},
}
# Assumed of an H100: FLOP/s of large bf16 products, and bytes a second of its memory
MATMUL_FLOPS, MEMORY_BANDWIDTH = 650e12, 3.35e12
Row = dict[str, object]


def print_figures() -> None:
    """Prints the two tables of the kernel."""
    sizes = [(outputs, candidates, 512) for outputs in (4096, 16384, 65536) for candidates in (4608, 50304, 262144)]
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

    absent = dict.fromkeys(("residuals", *FINAL, "target_bias"), "constexpr")
    pointers = {"sums": "*fp32", "target": "*i64", "bias": "*fp32"} | absent
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
    """Computes one loss in bf16, forward and backward, beside the plain form that stores all scores: what a GPU would
    launch and move, and the milliseconds of that and of three products, one after the other."""
    row: Row = {"N": f"{outputs:,}", "U": f"{candidates:,}", "D": features}
    for name, loss in {"": candidate_loss_on_gpu, ", plain": plain_loss}.items():
        operations, moved_bytes = count_loss(loss, outputs, candidates, features).totals()
        seconds = 6 * outputs * candidates * features / MATMUL_FLOPS + moved_bytes / MEMORY_BANDWIDTH
        row |= {f"operations{name}": operations, f"GB{name}": f"{moved_bytes / 1e9:.2f}"}
        row |= {f"ms{name}": f"{seconds * 1e3:.2f}"}
    return row


def candidate_loss_on_gpu(outputs_ND: Tensor, rows_UD: Tensor, target_N: Tensor) -> Tensor:
    """The mean loss by the kernel."""
    bias_U = torch.empty(len(rows_UD), device=rows_UD.device)
    return candidate_loss(outputs_ND, rows_UD, Candidates(None, bias_U, target_N)) / len(target_N)


def plain_loss(outputs_ND: Tensor, rows_UD: Tensor, target_N: Tensor) -> Tensor:
    """The same without biases by torch."""
    return F.cross_entropy(outputs_ND @ rows_UD.T, target_N)


def count_loss(loss: Callable[..., Tensor], outputs: int, candidates: int, features: int) -> OperationCounter:
    """Counts forward and backward in bf16 without computing them."""
    from megahead.losses import triton_kernel

    shapes = (outputs, features), (candidates, features)
    inputs = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    target_N = torch.empty(outputs, device="meta", dtype=torch.int64)
    counter = OperationCounter()
    with (
        mock.patch.object(fused_softmax, "supports_kernel", return_value=True),
        mock.patch.object(triton_kernel, "_softmax_kernel", CountedKernel(counter)),
        mock.patch.object(torch, "is_autocast_enabled", return_value=False),  # it does not know the meta device
        counter,
    ):
        torch.autograd.grad(loss(*inputs, target_N), inputs)
    return counter


class CountedKernel:
    """Counts launches of the loss's kernel, which reads scores twice and writes residuals."""

    def __init__(self, counter: OperationCounter) -> None:
        self.counter = counter

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._count

    def _count(self, scores_nw: Tensor, residuals: Tensor | None, *_: object, **options: object) -> None:
        self.counter.operations += 1
        written_bytes = 0 if residuals is None else scores_nw.numel() * residuals.itemsize
        self.counter.bytes += 2 * scores_nw.nbytes + written_bytes


CPU = torch.device("cpu")
# Prefixes of operations that compute nothing and move nothing
FREE_OPERATIONS = (
    *("empty", "new_empty", "detach", "alias"),
    *("_local_scalar_dense", "lift_fresh", "promote_types", "set_", "_unsafe_view"),
)
WRITE_ONLY = ("zero_", "fill_", "zeros", "ones", "full", "new_zeros", "zeros_like", "arange", "nll_loss_backward")
# They read only the rows that they look up
ROW_LOOKUPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
# They read the addends, and read and write the rows they add to: in place, except under the counter
ROW_ADDITIONS = ("index_add", "index_add_")


class OperationCounter(TorchDispatchMode):
    """Counts operations, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0
        self.dispatched = 0  # by the host: one for all tensors of a `_foreach`

    def totals(self) -> tuple[int, int]:
        return self.operations, self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(FREE_OPERATIONS):
            in_place = name.startswith("_foreach") and name.endswith("_")  # a kernel for each tensor of two dtypes
            self.dispatched += 1
            self.operations += len(args[0]) if in_place else 1
            self.bytes += _moved_bytes(name, args, args[0] if in_place else result)
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
