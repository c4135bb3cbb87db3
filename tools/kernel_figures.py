"""Compiles the loss kernel ahead of time and estimates its cost, without a GPU.

tools/kernel_figures.py
tools/kernel_figures.py --micro-steps

First, for each architecture and each set of kernel arguments: registers a thread, bytes spilled to memory, bytes of
shared memory, blocks a multiprocessor has registers and warps for, and the most bytes a thread loads and stores at
once. Then, for some losses and for the plain forms that store all scores: operations, gigabytes they move, and the
milliseconds of these and of three products at assumed rates, without overlap.

With --micro-steps, for a model of 6 layers and for the engine at each ZeRO stage, in bf16 with the settings of GPUs,
but counted on a CPU: operations of a micro-step, each at least a kernel unless compiled, and the bytes they read and
write for each parameter. So few tokens are read that almost all of these are weights, gradients and gradient sums.

Needs no device: ptxas comes with triton.
"""

from __future__ import annotations

import argparse

from megahead.errors import run_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-steps", action="store_true", help="count what micro-steps take instead")
    if parser.parse_args().micro_steps:
        from benchmarks.kernels import print_micro_steps

        print_micro_steps()
    else:
        from benchmarks.kernels import print_figures

        print_figures()


if __name__ == "__main__":
    run_command(main)
