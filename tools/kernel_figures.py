"""What can be said of the loss's kernel without a GPU: it is compiled ahead of time, and its work is summed up.

tools/kernel_figures.py

First, for each architecture and each way the kernel is called: registers a thread, bytes spilled to memory, bytes of
shared memory, blocks a multiprocessor has registers and warps for, and most bytes that a thread loads and stores at
once. Then, for some losses: chunks, kernels, and operations and bytes, with the time they take at assumed rates, if
nothing overlaps. Needs no device: ptxas comes with triton.
"""

from __future__ import annotations

import argparse

from megahead.errors import run_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    from benchmarks.kernels import print_figures

    print_figures()


if __name__ == "__main__":
    run_command(main)
