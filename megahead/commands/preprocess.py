"""Turns text into indexed datasets: PREFIX.bin, PREFIX.idx and PREFIX.json (counts and checksums).

megahead preprocess --input corpus.jsonl.zst --tokenizer tokenizer.json --output data/corpus --holdout 100
megahead preprocess --input 'pile/*.jsonl.zst' --tokenizer 20B_tokenizer.json --output data/pile --per-file \
    --drop meta.pile_set_name=Books3

megahead preprocess --table events.csv --user user --item item --time time --output data/events

megahead preprocess --input 'hf://datasets/wikimedia/wikipedia/20231101.sw?split=train' --tokenizer tokenizer.json \
    --output data/sw --per-file

With --per-file every input file becomes a dataset in the folder --output; the same command continues after it was
killed. `megahead merge-datasets` makes one dataset of them.

With --table events (a user met an item) become sequences of item ids, without a tokenizer: PREFIX, PREFIX-validation,
PREFIX-test and PREFIX-items.json.
"""

from __future__ import annotations

import argparse
import os
import time
from fractions import Fraction
from pathlib import Path

from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import END_TOKEN, PreprocessReport, Recipe, parse_holdout, preprocess, suitable_workers
from megahead.data.records import Selection, is_hub_url, parse_conditions
from megahead.data.shards import preprocess_shards
from megahead.data.sources import find_inputs, total_bytes
from megahead.data.writer import ProgressBar
from megahead.errors import DataError, FieldError, existing_path, require_at_least
from megahead.remote_files import local_file
from megahead.wording import pluralize

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # starting unused threads takes 0.05 s a process

MAX_LOCATIONS = 10
SHARED_OPTIONS = ("input", "table", "output")
TABLE_OPTIONS = ("user", "item", "time", "split", "min_count", "items")


def main() -> None:
    arguments = parse_arguments()
    print(preprocess_table(arguments) if arguments.table else preprocess_text(arguments))


def preprocess_text(arguments: argparse.Namespace) -> str:
    """Makes datasets of text; returns the final report."""
    if arguments.tokenizer is None:
        raise FieldError("--tokenizer", "name the tokenizer of the text", got="missing")
    wanted, unwanted = parse_conditions("--keep", arguments.keep), parse_conditions("--drop", arguments.drop)
    tail = arguments.holdout_tail
    recipe = Recipe(
        tokenizer=Path(local_file(arguments.tokenizer)),
        selection=Selection(tuple(arguments.text_key), wanted, unwanted),
        end_token=arguments.end_token,
        holdout=None if arguments.holdout is None else parse_holdout(parse_fraction("--holdout", arguments.holdout)),
        holdout_tail=None if tail is None else parse_holdout(parse_fraction("--holdout-tail", tail)),
        on_error=arguments.on_error,
        end_inside=arguments.end_inside,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none
    # datasets of the Hub are looked up later, once; under --per-file only those that were not begun before
    is_on_hub = any(map(is_hub_url, arguments.input))
    size = None if is_on_hub else total_bytes(find_inputs(arguments.input))
    workers = arguments.workers or suitable_workers(size, cores)
    started = time.monotonic()
    with ProgressBar("Tokenizing") as bar:
        if arguments.per_file:
            report = preprocess_shards(arguments.input, recipe, arguments.output, workers=workers, progress=bar)
        else:
            report = preprocess(arguments.input, output=arguments.output, workers=workers, progress=bar, **vars(recipe))
    described = describe_report(arguments.output, report, time.monotonic() - started)
    is_leaked = not arguments.per_file and recipe.held_out_share is None and holds_out_same_text(arguments.output)
    leaked = f"  {arguments.output}-validation has the same source: what an earlier call held out is trained on now"
    return f"{described}\n{leaked}" if is_leaked else described


def holds_out_same_text(output: str) -> bool:
    """Whether there is a held-out dataset with the source of the dataset `output`."""
    try:
        datasets = IndexedDataset(output), IndexedDataset(f"{output}-validation")
        sources = {dataset.info and dataset.info.source for dataset in datasets}
    except DataError:  # there is none
        return False
    return len(sources) == 1 and None not in sources


def preprocess_table(arguments: argparse.Namespace) -> str:
    """Makes datasets of events; returns the final report: counts, then the rows that were dropped, by reason."""
    from megahead.data.event_tables import EventColumns
    from megahead.data.item_sequences import ItemVocabulary, preprocess_events

    names = {option: getattr(arguments, option) for option in ("user", "item", "time")}
    for option, name in names.items():
        if name is None:
            raise FieldError(f"--{option}", f"name the table's column of the {option}", got="missing")
    require_at_least(1, min_count=arguments.min_count)
    vocabulary = None if arguments.items is None else ItemVocabulary.load(arguments.items)
    with ProgressBar("Reading") as bar:
        report = preprocess_events(
            arguments.table,
            EventColumns(**names),
            arguments.output,
            split=arguments.split,
            min_count=arguments.min_count,
            vocabulary=vocabulary,
            progress=bar,
        )
    documents = ", ".join(f"{count:,} for {name}" for name, count in report.documents.items())
    counts = f"{report.events:,} events of {report.users:,} users with {report.items:,} items"
    dropped = [f"  dropped: {count:,} rows {reason}" for reason, count in report.dropped.items() if count]
    return "\n".join([f"{arguments.output}: {counts}; sequences: {documents}", *dropped])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    inputs = ".jsonl, .json, .csv, .tsv, .txt and .md (the whole file is one document), all may be compressed (.gz, "
    inputs += ".zst); .dat.zst of lm_dataformat; .parquet; archives of these (.tar, .tar.gz, .zip); saved Hugging Face "
    inputs += "datasets; folders; globs; - for JSON lines on standard input; "
    inputs += "hf://datasets/OWNER/NAME[/CONFIG]?split=SPLIT[&revision=REVISION]"
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="F", help=inputs)
    tables = ".csv, .tsv (with a header, may be compressed) or .parquet"
    source.add_argument("--table", nargs="+", type=Path, metavar="F", help=f"tables of events: {tables}")
    add("--tokenizer", metavar="T", help="tokenizer.json, or a SentencePiece .model")
    add("--output", required=True, metavar="PREFIX", help="with --per-file: a folder")
    add("--per-file", action="store_true", help="one dataset for each input file, restartable")
    key = "key of the text, `a.b` for nested ones (default: text); of several, the first with text"
    add("--text-key", nargs="+", default=["text"], metavar="KEY", help=key)
    keep = "keep only documents that have one of the VALUEs given for each KEY"
    add("--keep", nargs="+", default=[], metavar="KEY=VALUE", help=keep)
    drop = "drop documents that match at least one condition"
    add("--drop", nargs="+", default=[], metavar="KEY=VALUE", help=drop)
    add("--on-error", choices=("fail", "skip"), default="fail", help="at a broken line (default: fail)")
    add("--end-token", help=f"closes each document (default: {END_TOKEN}, else the tokenizer's own)")
    inside = "if a text contains the end token, which splits its document (default: report)"
    add("--end-inside", choices=("report", "fail"), default="report", help=inside)
    held_out = "every N-th document (N >= 2), or this fraction of them (0.01), goes to PREFIX-validation instead"
    holdout = parser.add_mutually_exclusive_group()
    holdout.add_argument("--holdout", metavar="N", help=held_out)
    tail = "each document's end, this fraction of it, goes there: for few or long documents"
    holdout.add_argument("--holdout-tail", metavar="X", help=tail)
    add("--workers", type=int, help="processes (default: one for every 32 MB, at most the cores)")
    add = parser.add_argument_group("with --table").add_argument
    add("--user", metavar="COLUMN")
    add("--item", metavar="COLUMN")
    add("--time", metavar="COLUMN")
    split = "held out: each user's last item (test) and the one before it (validation), or events after "
    add("--split", choices=("last", "time"), default="last", help=f"{split}90 %% and 80 %% of all (default: last)")
    add("--min-count", type=int, default=1, metavar="N", help="drop items with fewer than N events")
    add("--items", type=existing_path, metavar="FILE", help="keep the ids of an earlier PREFIX-items.json")
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        is_ignored = name not in SHARED_OPTIONS and (name in TABLE_OPTIONS) != bool(arguments.table)
        if is_ignored and value != parser.get_default(name):
            rule = f"be left out with {'--table' if arguments.table else '--input'}"
            raise FieldError(f"--{name.replace('_', '-')}", rule, got=value)
    return arguments


def parse_fraction(field: str, text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise FieldError(field, "be a number, like 100 or 0.01", got=text) from None


def describe_report(output: str, report: PreprocessReport, seconds: float) -> str:
    """The final report: counts, then the documents that were skipped."""
    per_token = report.text_bytes / max(report.tokens - report.documents, 1)
    lines = [
        f"{output}: {pluralize(report.documents, 'document')} ({report.held_out:,} of them held out, "
        f"{report.skipped:,} empty skipped), {pluralize(report.tokens, 'token')} from "
        f"{report.text_bytes / 1e6:,.1f} MB of text ({per_token:.2f} bytes a token) in {seconds:.1f} s "
        f"with {report.engine}"  # the library that tokenized
    ]
    if report.left_out:
        lines.append(f"  {pluralize(report.left_out, 'document')} not wanted (--keep, --drop)")
    if report.end_inside:
        lines.append(f"  end tokens inside texts, which split their documents: {report.end_inside:,}")
    lines += location_lines("empty", report.skipped, report.empty_places)
    lines += location_lines("broken, skipped", report.broken, report.problems)
    return "\n".join(lines)


def location_lines(label: str, count: int, locations: list[str]) -> list[str]:
    """Lists the first locations, one per line, then the number of others."""
    if not count:
        return []
    first = locations[:MAX_LOCATIONS]
    more = [f"    and {count - len(first):,} more"] if count > len(first) else []
    return [f"  {label}: {count:,}", *(f"    {location}" for location in first), *more]
