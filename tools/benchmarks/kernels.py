"""The loss's kernel, compiled ahead of time for some architectures, and its work summed up: see kernel_figures.py."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megahead.config.objective import ON_GPU
from megahead.losses import triton_kernel as row_kernel
from megahead.report.tables import to_rich
from megahead.terminal import terminal

WAYS = {
    "sums and residuals": {"lse": "constexpr", "residuals": "*bf16"},
    "sums (evaluation, split)": {"lse": "constexpr", "residuals": "constexpr"},
    "residuals (split)": {"lse": "*fp32", "residuals": "*bf16"},
}
PRODUCTS, MEMORY = 650e12, 3.35e12
"""Assumed of an H100: operations a second of large bf16 products; bytes a second of its memory."""

LOSS_ASKED, CHUNK_ASKED = 1.0e-3, 0.2e-3
"""Seconds that an H200's host took to ask for the kernels of a loss and of each of its chunks; measured."""

Line = dict[str, object]


def print_figures() -> None:
    """Both tables."""
    console = terminal(width=160)
    console.print(to_rich([compiled(capability, way) for capability in (80, 90, 100) for way in WAYS]))
    console.print(to_rich(list(losses())))


def compiled(capability: int, way: str) -> Line:
    """The kernel in bf16 with a bias, with arguments aligned as they are in training: all but the number of candidates,
    which is a multiple of nothing for a vocabulary."""
    pointers = {"scores": "*fp32", "sums": "*fp32", "target": "*i64", "bias": "*fp32", "target_bias": "constexpr"}
    numbers = {"scale": "fp32", "count": "i32", "width": "i32", "stride": "i32", "BLOCK": "constexpr"}
    types, names = pointers | numbers | WAYS[way], row_kernel._softmax_kernel.arg_names
    constants: dict[tuple[int, ...], int | None] = {
        (names.index(name),): None for name, kind in types.items() if kind == "constexpr"
    }
    constants |= {(names.index("BLOCK"),): row_kernel.BLOCK}
    aligned = [
        place for place, name in enumerate(names) if name != "width" and types[name] not in ("constexpr", "fp32")
    ]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(row_kernel._softmax_kernel, {name: types[name] for name in names}, constants, attributes)
    options = {"num_warps": row_kernel.WARPS}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled, shared = resources(kernel.asm["cubin"])
    blocks = min(65536 // (-(-registers // 8) * 8 * 32 * row_kernel.WARPS), 64 // row_kernel.WARPS)
    return {
        "sm": capability,
        "way": way,
        "registers": registers,
        "spilled": spilled,
        "shared": shared,
        "blocks": blocks,
        "load": moved_at_once("ld", kernel.asm["ptx"]),
        "store": moved_at_once("st", kernel.asm["ptx"]),
    }


def moved_at_once(what: str, assembly: str) -> int:
    """Most bytes that an instruction of PTX moves from memory (`ld`) or to it (`st`) for one thread."""
    found = re.findall(rf"{what}\.global(?:\.[a-z:0-9]+?)*?(?:\.v(\d))?\.[a-z](\d+)\b", assembly)
    return max(int(count or 1) * int(bits) // 8 for count, bits in found)


def resources(binary: bytes) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack and local memory, bytes of shared memory."""
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([reader, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", told.stdout)}
    return found["REG"], found["STACK"] + found["LOCAL"], found["SHARED"]


def losses() -> Iterator[Line]:
    for outputs, candidates, features in (
        (16384, 4608, 512), (16384, 4608, 1024), (16384, 4608, 2048), (8192, 3072, 5120), (16384, 50304, 512)
    ):  # fmt: skip
        yield summed_up(outputs, candidates, features)


def summed_up(outputs: int, candidates: int, features: int) -> Line:
    """One loss, forward and backward, on one rank in bf16."""
    chunks = -(-outputs // ON_GPU.outputs(outputs, candidates, 4))
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
