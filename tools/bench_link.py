"""Times steps of ranks behind slow links, by embedding and ZeRO stage, and counts the bytes that each rank sends.

sudo OMP_NUM_THREADS=1 python tools/bench_link.py --ranks 2,4 --vocabulary 1048576 --megabits 1000
sudo OMP_NUM_THREADS=1 python tools/bench_link.py --ways dense:0,dense:1,dense:2,dense:3 --negatives --vocabulary 32768

Each rank is a process of one thread in its own network namespace, whose link is limited to so many megabits a second in
each direction (needs root, and iproute2's ip and tc). MB sent: a step's bytes from the rank that sends most, all
headers and acknowledgements included. A step is the engine's, without the loader; it includes planning the embedding
rows to fetch.
"""

from __future__ import annotations

from functools import partial

from benchmarks.command import build_config, build_parser, parse_integers, report
from megahead.errors import run_command
from megahead.estimate import run_parameters


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--ranks", type=parse_integers, default=[2, 4], help="numbers of ranks (default: 2,4)")
    parser.add_argument("--vocabulary", type=int, default=1 << 20, help="ids (default: 1048576)")
    parser.add_argument("--hidden-size", type=int, default=64, help="features of a row (default: 64)")
    parser.add_argument("--layers", type=int, default=3, help="layers of the body (default: 3)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a rank's micro-batch (default: 8)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens a row (default: 256)")
    ways_help = "steps to time, each EMBEDDING:ZERO_STAGE (default: rows:0,dense:0,dense:3)"
    parser.add_argument("--ways", default="rows:0,dense:0,dense:3", metavar="WAY,...", help=ways_help)
    parser.add_argument("--negatives", action="store_true", help="also share negatives, as ids and as embeddings")
    parser.add_argument("--megabits", type=int, default=1000, help="rate of each link, Mbit/s (default: 1000)")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each (default: 5)")
    arguments = parser.parse_args()
    shape = {"num_layers": arguments.layers, "hidden_size": arguments.hidden_size, "num_heads": 2}
    shape["vocab_size"] = arguments.vocabulary
    config = build_config(shape, arguments.rows, arguments.sequence_length, "engine.device=cpu")
    parameters = run_parameters(config)
    print(f"{parameters.embedding:,} parameters in the embedding, {parameters.body:,} in the blocks")
    from benchmarks.link import compare_variants, exchange_variants, parse_ways, step_variants

    limits = arguments.ranks, arguments.megabits, arguments.steps
    tables = [compare_variants(config, *limits, partial(step_variants, parse_ways(arguments.ways)))]
    tables += [compare_variants(config, *limits, exchange_variants)] if arguments.negatives else []
    report(*tables, output=arguments.output)


if __name__ == "__main__":
    run_command(main)
