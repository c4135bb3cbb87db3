"""What can be said of the loss's kernel without a GPU: it is compiled ahead of time, and its work is summed up.

tools/kernel_figures.py
tools/kernel_figures.py --micro-steps

First, for each architecture and each way the kernel is called: registers a thread, bytes spilled to memory, bytes of
shared memory, blocks a multiprocessor has registers and warps for, and most bytes that a thread loads and stores at
once. Then, for some losses: chunks, kernels, and operations and bytes, with the time they take at assumed rates, if
nothing overlaps, and with the time in which the host of an H200 was measured to ask for the kernels.

With --micro-steps, for a model of 6 layers and for the engine at each ZeRO stage, in bf16 with the settings of GPUs,
but counted on a CPU: operations of a micro-step, each a kernel or more where nothing is compiled, and bytes that
they read and write for each parameter. So few tokens are read that these belong to weights, gradients and their sums.

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
