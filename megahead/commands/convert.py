"""Exports a checkpoint as a Hugging Face folder, imports one to start from, or gives a model another vocabulary.

megahead convert to-hf --checkpoint runs/headless --output exports/headless --head pmi [--push OWNER/NAME]
megahead convert to-hf --checkpoint runs/retromae --output exports/retromae --head none --pooling cls
megahead convert from-hf --model exports/headless --output runs/imported
megahead convert revocabulary --model runs/headless --tokenizer larger.json --output runs/larger
megahead convert items --model runs/items --output exports/items --sequences data/items-test
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megahead.commands import checkpoint_path
from megahead.config.objective import HeadName
from megahead.errors import FieldError, existing_path
from megahead.hf.other_programs import POOLINGS
from megahead.report.tables import terminal

if TYPE_CHECKING:
    from megahead.hf.export import ExportReport

METHODS = ("mean", "rarity", "random")
"""Copied from `megahead/hf/revocabulary.py`, whose import would take a second."""


def main() -> None:
    arguments = _parser().parse_args()
    console = terminal(soft_wrap=True)
    if arguments.subcommand == "from-hf":
        from megahead.hf.importing import from_hf

        ids = arguments.special_ids
        special_ids = ids and dict(zip(("mask_token", "cls_token", "sep_token"), ids, strict=True))
        output = from_hf(arguments.model, arguments.output, special_ids=special_ids)
        console.print(f"wrote {output}: a checkpoint for init.from_checkpoint, and model.yaml for the config")
    elif arguments.subcommand == "revocabulary":
        from megahead.hf.revocabulary import revocabulary

        report = revocabulary(arguments.model, arguments.tokenizer, arguments.output, arguments.method)
        console.print(
            f"wrote {report.folder}: a checkpoint for init.from_checkpoint, and model.yaml for the config; "
            f"{report.new_vocab_size:,} ids instead of {report.old_vocab_size:,}\n"
            f"{report.num_kept:,} rows kept, {report.num_split:,} of tokens in pieces "
            f"({report.pieces_per_token:.1f} on average), {report.num_new:,} new"
        )
    elif arguments.subcommand == "items":
        console.print(export_items(arguments))
    else:
        for message in to_hf(arguments):
            console.print(message)


def to_hf(arguments: argparse.Namespace) -> Iterator[str]:
    """Exports the model, adds a sample and curves to the folder, and uploads it; yields messages for the user."""
    if not 0 < arguments.shard_size < inf:
        raise FieldError("--shard-size", "be above 0", got=arguments.shard_size)
    from megahead.sharing import add_sample_and_curves, check_push, push

    if arguments.push is not None:
        metadata = {"license_name": arguments.license, "languages": arguments.language}
        check_push(arguments.push, private=arguments.private, **metadata)
    elif arguments.private:
        raise FieldError("--private", "be given with --push", got="alone")
    from megahead.hf.card import CardMetadata
    from megahead.hf.export import export
    from megahead.run_folder import RunFolder

    report = export(
        arguments.checkpoint,
        arguments.output,
        arguments.head,
        dtype=arguments.dtype,
        keep_padding=arguments.keep_padding,
        shard_bytes=int(arguments.shard_size * 10**9),
        card=CardMetadata(arguments.push or str(arguments.output), arguments.license, tuple(arguments.language)),
        pooling=arguments.pooling,
    )
    add_sample_and_curves(report.folder, RunFolder.of(arguments.checkpoint).path)
    yield export_summary(report)
    if arguments.push is not None:
        yield f"uploaded to {push(report.folder, arguments.push, private=arguments.private)}"


def export_summary(report: ExportReport) -> str:
    """Describes an export in three to five lines."""
    parity = report.parity
    errors = ", ".join(f"{error:.1e} in {kind}" for kind, error in parity.largest_error.items())
    lines = [
        f"wrote {report.folder} in {report.seconds:.1f} s: head {report.head}, {report.dtype}",
        f"{parity.compared} of {parity.tokens} tokens equal the checkpoint's within {errors} "
        f"(largest {parity.largest_output:.1f})",
        report.serving_support,
    ]
    if report.tokenizer is None:
        lines.append("no tokenizer: the run has no tokenizer.json")
    if report.settings_conflict is not None:
        lines.append(f"settings of the folder that the run began from are left out, since {report.settings_conflict}")
    return "\n".join(lines)


def export_items(arguments: argparse.Namespace) -> str:
    """Writes vectors of items and sequences; returns a description."""
    from megahead.data.indexed import dataset_paths
    from megahead.data.item_sequences import ItemVocabulary, read_sequences
    from megahead.evaluate.next_item import require_same_items, write_vectors

    if arguments.sequences is not None and arguments.items is None:
        require_same_items(arguments.model, arguments.sequences)
    vocabulary = None if arguments.items is None else ItemVocabulary.load(arguments.items)
    sequences = [] if arguments.sequences is None else read_sequences(dataset_paths(arguments.sequences)[1])
    items, contexts, error = write_vectors(arguments.model, arguments.output, sequences, vocabulary)
    return (
        f"wrote {arguments.output}: {items[0]:,} items and {contexts[0]:,} contexts of {items[1]} features; their "
        f"products are the model's scores within {error:.1e}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subcommands = parser.add_subparsers(dest="subcommand", required=True)

    add = subcommands.add_parser("to-hf", help="checkpoint to Hugging Face folder").add_argument
    add("--checkpoint", type=checkpoint_path, required=True, metavar="DIR", help="step folder, or a run: its newest")
    add("--output", type=Path, required=True, metavar="DIR", help="new folder, or an earlier export")
    heads = "none: the backbone alone; tied: the embedding; pmi: the training-free head; trained: a vanilla model's own"
    add("--head", required=True, choices=get_args(HeadName), help=heads)
    vectors = "encoders: the folder also opens in sentence-transformers, which pools by [CLS] or the mean"
    add("--pooling", choices=POOLINGS, help=vectors)
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--keep-padding", action="store_true", help="keep the embedding's padding rows, whose ids are never probable")
    add("--push", metavar="OWNER/NAME", help="upload to this repository of the Hugging Face Hub, by `hf auth login`")
    add("--private", action="store_true", help="make a repository that only its owner sees")
    add("--license", metavar="NAME", help="license of the weights for the model card, such as apache-2.0")
    add("--language", action="append", default=[], metavar="CODE", help="the model's language, such as en; repeatable")
    add("--shard-size", type=float, default=5.0, metavar="GB", help="largest weight file (default: 5)")

    add = subcommands.add_parser("from-hf", help="Hugging Face folder to checkpoint").add_argument
    kinds = "folder of a model in safetensors, of a family that docs/models.md lists"
    add("--model", type=existing_path, required=True, metavar="DIR", help=kinds)
    add("--output", type=Path, required=True, metavar="DIR", help="new run folder")
    special = "ids of an encoder's special tokens, if its files do not name them"
    add("--special-ids", type=int, nargs=3, metavar=("MASK", "CLS", "SEP"), help=special)

    add = subcommands.add_parser(
        "items", help="vectors of items and sequences for nearest-neighbour search"
    ).add_argument
    add("--model", type=checkpoint_path, required=True, metavar="DIR", help="run, checkpoint or export")
    add("--output", type=Path, required=True, metavar="DIR", help="new folder, or an earlier one of this command")
    add("--items", type=existing_path, metavar="FILE", help="items.json (default: beside the run's training data)")
    add("--sequences", type=Path, metavar="PREFIX", help="dataset whose documents get context vectors")

    add = subcommands.add_parser("revocabulary", help="give a model another tokenizer").add_argument
    model = "run, checkpoint, or folder as for from-hf"
    add("--model", type=checkpoint_path, required=True, metavar="DIR", help=model)
    add("--tokenizer", type=existing_path, required=True, metavar="FILE", help="the new tokenizer.json")
    add("--output", type=Path, required=True, metavar="DIR", help="new run folder")
    rows = "rows of new tokens: mean of their pieces (default), the same with more weight on rare pieces, or random"
    add("--method", default="mean", choices=METHODS, help=rows)
    return parser
