"""Times steps of the engine against a plain torch loop, and kernel launches.

OMP_NUM_THREADS=1 python tools/bench_engine.py  every ZeRO stage on one rank, and a plain torch loop
python tools/bench_engine.py --launches --device cuda  the host's time to launch an operator, a CUDA graph, the loss
python tools/bench_engine.py --device cuda --preset pythia-70m --sequence-length 2048 --precision bf16

Every variant runs in its own processes (DeepSpeed patches the process that imports it) with one thread. Variants
take single steps in turn, so that noise affects all alike. Ratios, medians over rounds, divide a step's time by the
first variant's in the same round; CPU time, unlike wall time, excludes waiting for other programs.
"""

from __future__ import annotations

from benchmarks.command import PYTHIA_VOCABULARY, build_config, build_parser, parse_integers, report
from megahead.config.model import NAMED_SIZES
from megahead.errors import run_command
from megahead.estimate import run_parameters
from megahead.wording import pluralize

SHAPE = {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "vocab_size": 12288}


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--preset", choices=NAMED_SIZES, help="a named decoder (default: 25 M parameters)")
    parser.add_argument("--rows", type=int, default=8, help="rows of the micro-batch (default: 8)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens a row (default: 256)")
    parser.add_argument("--stages", type=parse_integers, default=[0, 1, 2, 3], help="ZeRO stages (default: 0,1,2,3)")
    parser.add_argument("--rounds", type=int, default=15, help="counted steps of each (default: 15)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument("--launches", action="store_true", help="time kernel launches alone")
    arguments = parser.parse_args()
    if arguments.launches:
        import torch

        from benchmarks.engines import time_launches

        report(time_launches(torch.device(arguments.device), 2 * arguments.rounds), output=arguments.output)
        return
    shape = SHAPE if arguments.preset is None else {"size": arguments.preset, "vocab_size": PYTHIA_VOCABULARY}
    engine_settings = f"engine.device={arguments.device}", f"engine.precision={arguments.precision}"
    config = build_config(shape, arguments.rows, arguments.sequence_length, *engine_settings)
    from benchmarks.engines import time_engines

    rows = time_engines(config, arguments.stages, arguments.rounds)
    batch_text = f"{arguments.rows} x {pluralize(arguments.sequence_length, 'token')}"
    device_text = "one thread" if arguments.device == "cpu" else f"{arguments.precision} on a CUDA device"
    print(f"{run_parameters(config).total / 1e6:.1f} M parameters, {batch_text}, {device_text}")
    report(rows, output=arguments.output)


if __name__ == "__main__":
    run_command(main)
