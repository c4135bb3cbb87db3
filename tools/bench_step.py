"""Times whole training steps, headless against vanilla, in turn: A B A B ..., so that a noisy machine hits both alike.

tools/bench_step.py --preset pythia-14m --micro-batch 8 --sequence-length 512
tools/bench_step.py --preset bert-small --micro-batch 16 --sequence-length 128
tools/bench_step.py --config configs/demo-headless.yaml
tools/bench_step.py --preset pythia-70m --micro-batch 8 --sequence-length 2048 --precision bf16 --compile
tools/bench_step.py --preset pythia-31m --micro-batch 8 --sequence-length 256 --vocabulary 32768,131072,524288,1048576
tools/bench_step.py --preset pythia-410m --sequence-length 2048 --precision bf16 --largest 512

A step is forward and backward of a global batch (of --preset of one micro-batch), in micro-batches and with candidates
as the config says on one rank, clipping and the optimizer's update, without an engine. Tokens come from the config's
dataset (or --data PREFIX), else from Zipf's law, which has about as many different tokens as real text.
An encoder masks 15 % of its tokens, unless --set says otherwise; its vanilla head is BERT's own, tied. An objective
that asks how often each id is in the text has these tokens counted. What a vanilla objective does not know is left out
of its steps.

ms: median step; best: fastest; rows: candidates scored; of rate: share of the device's measured matrix rate; MFU: share
of its maker's figure; peak MB: weights, gradients, moments and activations (on a CPU of one step in a process of its
own, not when compiled); body, loss, opt: shares of the step in the backbone, in the look-up and the loss (both forward
and backward), and in clipping and the optimizer. A GPU is waited for at the end of a step alone: it notes by its own
clock when it comes to each part. In bf16 its weights are bf16, with float32 ones in the optimizer, as the engine has
them.

--vocabulary times headless steps through the engine instead, under larger and larger vocabularies and on the same ids,
with the embedding in rows and dense, on --ranks ranks of one thread each. CPU ms and CPU ratio (to the first
vocabulary) leave out waiting for others' programs; a step's MiB: what it takes beside what lies there between steps, on
the rank that takes most.

--largest finds the largest micro-batch of each objective that a GPU's memory holds.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from benchmarks.command import PYTHIA_VOCABULARY, config_of, parser_of, report
from megahead.config.loading import load_config
from megahead.config.model import NAMED_SIZES, ModelConfig
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.errors import FieldError, run_command

if TYPE_CHECKING:
    from benchmarks.steps import How, Plan

BERT_VOCABULARY = {"distilbert-multilingual": 119547}
BERT_TOKENS = {"mask_token": 103, "cls_token": 101, "sep_token": 102}


def main() -> None:
    arguments = _parser().parse_args()
    config = _config(arguments)
    plans = _plans(arguments, config)
    sizes = _vocabularies(arguments.vocabulary)
    if arguments.ranks > 1 and (arguments.device == "cuda" or not sizes):
        raise FieldError("--ranks", "be 1 without --vocabulary and on one GPU", got=arguments.ranks)
    if arguments.data:
        IndexedDataset(arguments.data)  # what is wrong is reported before torch is imported
    import torch

    from benchmarks.engines import grow
    from benchmarks.steps import fill, time_steps
    from megahead.distributed.group import Group
    from megahead.train.run import resolve_precision

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    config = resolve_precision(config, device, Group())
    if arguments.largest:
        lines = fill(config, arguments.objectives.split(","), arguments.largest, arguments.data, device)
    elif sizes:
        kinds = arguments.embedding.split(",")
        lines = grow(config, sizes, arguments.ranks, arguments.data, arguments.steps, device, kinds)
    else:
        lines = time_steps(config, plans, arguments.data, arguments.steps, device)
    report(lines, output=arguments.output)


def _vocabularies(given: str | None) -> list[int]:
    """The sizes that --vocabulary names."""
    sizes = [size.strip() for size in (given or "").split(",") if size.strip()]
    if not all(size.isdecimal() and int(size) > 1 for size in sizes):
        raise FieldError("--vocabulary", "be sizes of vocabularies, separated by commas", got=given)
    return [int(size) for size in sizes]


def _plans(arguments: argparse.Namespace, config: RunConfig) -> list[Plan]:
    """Every objective as it is, then every one compiled, then with a whole last block, then with Muon."""
    names = arguments.objectives.split(",")
    hows: list[tuple[How, bool]] = [("as it is", True), ("whole last block", arguments.whole), ("muon", arguments.muon)]
    hows.insert(1, ("compiled", arguments.compile and config.engine.compile is not True))
    return [(name, how) for how, wanted in hows if wanted for name in names]


def _config(arguments: argparse.Namespace) -> RunConfig:
    """Of the file or the preset; --precision and --set change either, the latter last."""
    overrides = [f"engine.precision={arguments.precision}"] if arguments.precision else []
    overrides += ["engine.compile=false"] if arguments.compile else []  # as it is: plain, also on CUDA
    overrides += arguments.set
    if arguments.config:
        for option, setting, given in (
            ("--micro-batch", "batch.micro_size", arguments.micro_batch),
            ("--sequence-length", "data.sequence_length", arguments.sequence_length),
        ):
            if given is not None:
                hint = f"use --set {setting}=N"
                raise FieldError(option, "go with --preset", got="given with --config", hint=hint)
        return load_config(arguments.config, overrides)
    size, length, rows = arguments.preset, arguments.sequence_length or 512, arguments.micro_batch or 8
    encoder = ModelConfig.model_validate({"size": size, "vocab_size": 2}).is_encoder()
    vocabulary = BERT_VOCABULARY.get(size, 30522) if encoder else PYTHIA_VOCABULARY
    shape = {"size": size, "vocab_size": vocabulary, "max_positions": max(512 if encoder else 2048, length)}
    return config_of(shape, rows, length, f"name={size}", *overrides, masking=BERT_TOKENS if encoder else None)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("Time whole training steps, headless against vanilla.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", choices=NAMED_SIZES, help="a named size, with Pythia's or BERT's vocabulary")
    what.add_argument("--config", help="a run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting")
    parser.add_argument("--data", metavar="PREFIX", help="indexed dataset to take tokens from")
    parser.add_argument("--micro-batch", type=int, help="rows of --preset (default: 8)")
    parser.add_argument("--sequence-length", type=int, help="targets a row of --preset (default: 512)")
    parser.add_argument("--objectives", default="headless,vanilla", help="what to compare (default: headless,vanilla)")
    parser.add_argument("--vocabulary", metavar="V,...", help="time headless steps under these vocabularies instead")
    parser.add_argument("--ranks", type=int, default=1, help="of each of --vocabulary, on CPUs (default: 1)")
    parser.add_argument("--embedding", default="rows,dense", help="kinds of --vocabulary (default: rows,dense)")
    parser.add_argument("--largest", type=int, metavar="ROWS", help="find the largest micro-batch up to so many rows")
    parser.add_argument("--compile", action="store_true", help="time each with compiled blocks, too")
    parser.add_argument("--whole", action="store_true", help="time an encoder's last block of all tokens, too")
    parser.add_argument("--muon", action="store_true", help="time each with Muon for the blocks, too")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: the config's; of --preset, fp32")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="CPU threads")
    return parser


if __name__ == "__main__":
    run_command(main)
