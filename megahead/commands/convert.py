"""Exports a checkpoint as a Hugging Face folder, or imports one to start from.

megahead convert to-hf --checkpoint runs/headless --output exports/headless --head pmi
megahead convert from-hf --model exports/headless --output runs/imported
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from rich.console import Console

from megahead import convert
from megahead.config import HeadName
from megahead.errors import existing


def main() -> None:
    arguments = _parser().parse_args()
    console = Console(highlight=False, soft_wrap=True)
    if arguments.direction == "from-hf":
        output = convert.from_hf(arguments.model, arguments.output)
        console.print(f"wrote {output}: a checkpoint for init.from_checkpoint")
        return
    report = convert.export(
        arguments.checkpoint,
        arguments.output,
        arguments.head,
        dtype=arguments.dtype,
        keep_padding=arguments.keep_padding,
        shard_bytes=int(arguments.shard_size * 10**9),
    )
    console.print(summary(report))


def summary(report: convert.ExportReport) -> str:
    """An export, described in two or three lines."""
    parity = report.parity
    errors = ", ".join(f"{error:.1e} in {kind}" for kind, error in parity.largest_error.items())
    lines = [
        f"wrote {report.folder} in {report.seconds:.1f} s: head {report.head}, {report.dtype}",
        f"{parity.compared} of {parity.tokens} tokens equal the checkpoint's within {errors} "
        f"(largest {parity.largest_output:.1f})",
    ]
    if report.tokenizer is None:
        lines.append("no tokenizer: the run has no tokenizer.json")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    directions = parser.add_subparsers(dest="direction", required=True)
    to_hf = directions.add_parser("to-hf", help="checkpoint to Hugging Face folder")
    to_hf.add_argument(
        "--checkpoint", type=existing, required=True, metavar="DIR", help="step folder, or a run: its newest"
    )
    to_hf.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder, or an earlier export")
    to_hf.add_argument(
        "--head",
        required=True,
        choices=get_args(HeadName),
        help="none: the backbone alone; tied: E h; pmi: E h + log q, training-free; trained: a vanilla model's own",
    )
    to_hf.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    to_hf.add_argument(
        "--keep-padding", action="store_true", help="keep the rows that pad the vocabulary, never probable"
    )
    to_hf.add_argument("--shard-size", type=float, default=5.0, metavar="GB", help="largest weight file (default: 5)")
    back = directions.add_parser("from-hf", help="Hugging Face folder to checkpoint")
    back.add_argument(
        "--model",
        type=existing,
        required=True,
        metavar="DIR",
        help="folder of a GPT-NeoX, Llama, Mistral, Qwen 2 or 3, BERT or DistilBERT in safetensors",
    )
    back.add_argument("--output", type=Path, required=True, metavar="DIR", help="new run folder")
    return parser
