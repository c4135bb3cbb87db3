"""Times whole training steps, headless against vanilla, in turn (A B A B ...), so that noise affects both alike.

python tools/bench_step.py --preset pythia-14m --micro-batch 8 --sequence-length 512
python tools/bench_step.py --preset bert-small --micro-batch 16 --sequence-length 128
python tools/bench_step.py --config configs/demo-headless.yaml
python tools/bench_step.py --preset pythia-70m --micro-batch 8 --sequence-length 2048 --precision bf16 --compile
python tools/bench_step.py --preset pythia-31m --micro-batch 8 --sequence-length 256 --vocabulary 32768,1048576

A step is forward and backward of a global batch (with --preset one micro-batch) on one rank, clipping and the
optimizer's update, without an engine. Tokens come from the config's dataset (or --data PREFIX), else they are
Zipf-distributed, with about as many different ids as real text. An encoder masks 15 % of its tokens, unless --set says
otherwise; its vanilla head is BERT's, tied. An objective that needs token counts takes the counts of these tokens.
Settings that a vanilla objective does not have are dropped for it.

ms: median step; best: fastest; rows: candidates scored; of rate: share of the device's measured matmul rate; MFU: share
of its published peak; peak MB: weights, gradients, moments and activations (on a CPU those of one step in a child
process, unless compiled); body, loss, opt: shares of the step in the backbone, in the look-up and the loss (both
forward and backward), and in clipping and the optimizer. A GPU is synchronized only at the end of a step; CUDA events
time its parts. In bf16 the weights are bf16, with float32 master weights in the optimizer, as in the engine.

--vocabulary times headless steps of the engine instead, with increasing vocabulary sizes on the same ids, the embedding
sharded (rows) or dense, on --ranks ranks of one thread each. CPU ms and CPU ratio (to the first vocabulary) exclude
waiting for other programs; a step's MiB: memory it allocates above that between steps, the most of any rank.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from benchmarks.command import PYTHIA_VOCABULARY, build_config, build_parser, report
from megahead.config.loading import load_config
from megahead.config.model import NAMED_SIZES, ModelConfig
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.errors import FieldError, run_command

if TYPE_CHECKING:
    from benchmarks.steps import Mode, VariantSpec

ENCODER_VOCABULARIES = {
    "distilbert-multilingual": 119547,
    **dict.fromkeys(("roberta-base", "roberta-large"), 50265),
    **dict.fromkeys(("xlm-r-base", "xlm-r-large"), 250002),
    **dict.fromkeys(("mmbert-small", "mmbert-base"), 256000),
}
"""All other encoders have BERT's vocabulary."""
BERT_TOKENS = {"mask_token": 103, "cls_token": 101, "sep_token": 102}


def main() -> None:
    arguments = _parser().parse_args()
    config = _config(arguments)
    variants = _variants(arguments, config)
    sizes = _parse_vocabularies(arguments.vocabulary)
    if arguments.data:
        IndexedDataset(arguments.data)  # reports its errors before the slow import of torch
    import torch

    from benchmarks.engines import time_vocabularies
    from benchmarks.steps import time_steps
    from megahead.distributed.group import Group
    from megahead.train.run import resolve_precision

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.ranks > 1 and (device.type == "cuda" or not sizes):
        raise FieldError("--ranks", "be 1 without --vocabulary and on one GPU", got=arguments.ranks)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    config = resolve_precision(config, device, Group())
    if sizes:
        embeddings = arguments.embedding.split(",")
        rows = time_vocabularies(config, sizes, arguments.ranks, arguments.data, arguments.steps, device, embeddings)
    else:
        rows = time_steps(config, variants, arguments.data, arguments.steps, device)
    report(rows, output=arguments.output)


def _parse_vocabularies(text: str | None) -> list[int]:
    """Parses the sizes of --vocabulary."""
    sizes = [size.strip() for size in (text or "").split(",") if size.strip()]
    if not all(size.isdecimal() and int(size) > 1 for size in sizes):
        raise FieldError("--vocabulary", "be sizes of vocabularies, separated by commas", got=text)
    return [int(size) for size in sizes]


def _variants(arguments: argparse.Namespace, config: RunConfig) -> list[VariantSpec]:
    """Every objective in the default mode, then compiled, with the last block computed for all tokens, with Muon."""
    compiled = arguments.compile and config.engine.compile is not True
    modes: dict[Mode, bool] = {"default": True, "compiled": compiled}
    modes |= {"whole last block": arguments.whole, "muon": arguments.muon}
    return [(name, mode) for mode, chosen in modes.items() if chosen for name in arguments.objectives.split(",")]


def _config(arguments: argparse.Namespace) -> RunConfig:
    """The config of the file or the preset, with the overrides of --precision and then --set."""
    overrides = [f"engine.precision={arguments.precision}"] if arguments.precision else []
    overrides += ["engine.compile=false"] if arguments.compile else []  # the default mode is not compiled, also on CUDA
    overrides += arguments.set
    if arguments.config:
        for option, setting, value in (
            ("--micro-batch", "batch.micro_size", arguments.micro_batch),
            ("--sequence-length", "data.sequence_length", arguments.sequence_length),
        ):
            if value is not None:
                hint = f"use --set {setting}=N"
                raise FieldError(option, "go with --preset", got="given with --config", hint=hint)
        return load_config(arguments.config, overrides)
    size, sequence_length, num_rows = arguments.preset, arguments.sequence_length or 512, arguments.micro_batch or 8
    model = ModelConfig.model_validate({"size": size, "vocab_size": 2})
    encoder, padding = model.is_encoder(), model.padding_token()
    masking = BERT_TOKENS | {"special_tokens": [] if padding is None else [padding]} if encoder else None
    vocabulary = ENCODER_VOCABULARIES.get(size, 30522) if encoder else PYTHIA_VOCABULARY
    shape = {"size": size, "vocab_size": vocabulary, "max_positions": max(512 if encoder else 2048, sequence_length)}
    return build_config(shape, num_rows, sequence_length, f"name={size}", *overrides, masking=masking)


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("Time whole training steps, headless against vanilla.")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=NAMED_SIZES, help="a named size with its own, BERT's or Pythia's ids")
    model.add_argument("--config", help="a run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a setting")
    parser.add_argument("--data", metavar="PREFIX", help="indexed dataset to take tokens from")
    parser.add_argument("--micro-batch", type=int, help="rows of --preset (default: 8)")
    parser.add_argument("--sequence-length", type=int, help="targets a row of --preset (default: 512)")
    parser.add_argument("--objectives", default="headless,vanilla", help="what to compare (default: headless,vanilla)")
    parser.add_argument("--vocabulary", metavar="V,...", help="time headless steps under these vocabularies instead")
    parser.add_argument("--ranks", type=int, default=1, help="for each --vocabulary size, on CPUs (default: 1)")
    parser.add_argument("--embedding", default="rows,dense", help="embeddings under --vocabulary (default: rows,dense)")
    parser.add_argument("--compile", action="store_true", help="time each with compiled blocks, too")
    parser.add_argument("--whole", action="store_true", help="also time encoders whose last block computes all tokens")
    parser.add_argument("--muon", action="store_true", help="time each with Muon for the blocks, too")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: the config's; of --preset, fp32")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="CPU threads")
    return parser


if __name__ == "__main__":
    run_command(main)
