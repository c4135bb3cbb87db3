"""Prints the resources of the loss's kernel as JSON, compiled for each architecture and each set of arguments.

Needs no device: ptxas comes with triton. Its own process, since Triton may be imported for interpreting elsewhere.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megahead.losses import triton_kernel

FINAL = {"lse": "*fp32", "known_target_score": "*fp32"}
WAYS = {
    "sums and residuals": {"scores": "*bf16", "score_gradients": "*bf16"},
    "sums (split)": {"scores": "*bf16"},
    "residuals (split)": {"scores": "*bf16", "score_gradients": "*bf16"} | FINAL,
    "sums (evaluation)": {"scores": "*fp32"},
    "sums and residuals (fp16)": {"scores": "*fp32", "score_gradients": "*fp16"},
}


def compiled(capability: int, way: str) -> dict[str, object]:
    """Arguments are aligned as in training: all but the number of candidates, which may be any vocabulary size."""
    absent = dict.fromkeys(("score_gradients", *FINAL, "as_target_bias"), "constexpr")
    pointers = {"sums": "*fp32", "target": "*i64", "bias": "*fp32"} | absent
    scalars = {"scale": "fp32", "count": "i32", "width": "i32", "stride": "i32", "BLOCK": "constexpr"}
    type_by_name = pointers | scalars | WAYS[way]
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
    row: dict[str, object] = {"sm": capability, "way": way, "registers": registers, "spilled": spilled}
    row |= {"shared": shared, "blocks": blocks}
    return row | {name: max_access_bytes(name, kernel.asm["ptx"]) for name in ("ld", "st")}


def max_access_bytes(instruction: str, assembly: str) -> int:
    """The most bytes that one `ld` or `st` instruction of PTX `assembly` moves for a thread."""
    accesses = re.findall(rf"{instruction}\.global(?:\.[a-z:0-9]+?)*?(?:\.v(\d))?\.[a-z](\d+)\b", assembly)
    return max(int(count or 1) * int(bits) // 8 for count, bits in accesses)


def resources(binary: bytes) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack and local memory, bytes of shared memory."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", result.stdout)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"], usage["SHARED"]


if __name__ == "__main__":
    print(json.dumps([compiled(capability, way) for capability in (80, 90, 100) for way in WAYS]))
