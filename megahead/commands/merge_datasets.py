"""Concatenates several indexed datasets into one, in the order given, with their document boundaries.

megahead merge-datasets --input data/pile/00 data/pile/01 --output data/pile-2
megahead merge-datasets --input data/pile --output data/pile-all      (a folder: all its datasets, by name)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megahead.data.inspection import merge_datasets
from megahead.data.writer import ProgressBar
from megahead.errors import DataError
from megahead.wording import pluralize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs = "datasets, or folders of them (without -validation)"
    parser.add_argument("--input", nargs="+", required=True, type=_not_empty, metavar="PREFIX", help=inputs)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="a new dataset")
    parser.add_argument("--overwrite", action="store_true", help="replace an --output that is there already")
    arguments = parser.parse_args()
    prefixes = [prefix for path in arguments.input for prefix in find_datasets(Path(path))]
    with ProgressBar("Merging") as bar:
        merged = merge_datasets(prefixes, arguments.output, overwrite=arguments.overwrite, progress=bar)
    print(
        f"{arguments.output}: {pluralize(len(prefixes), 'dataset')}, {pluralize(len(merged), 'sequence')}, "
        f"{pluralize(merged.num_documents, 'document')}, {pluralize(merged.num_tokens, 'token')}"
    )


def _not_empty(text: str) -> str:
    """Returns `text`, for argparse; DataError for an empty prefix (an unset shell variable), which would mean the
    working directory."""
    if not text:
        raise DataError("--input must name datasets, but one is empty.")
    return text


def find_datasets(path: Path) -> list[Path]:
    """The prefixes of all datasets in the folder `path`, by name, without held-out parts; else `path` as a prefix."""
    if not path.is_dir():
        return [path]
    from megahead.data.item_sequences import items_path

    names = [index.stem for index in sorted(path.glob("*.idx"))]
    held_out = {f"{name}-test" for name in names if items_path(path / name).exists()}  # made by `preprocess --table`
    prefixes = [path / name for name in names if not (name.endswith("-validation") or name in held_out)]
    if not prefixes:
        raise DataError(f"`{path}` must hold datasets (.idx and .bin), but holds none.")
    return prefixes
