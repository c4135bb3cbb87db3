"""Concatenates several indexed datasets into one, in the order given, with their document boundaries.

megahead merge-datasets --input data/pile/00 data/pile/01 --output data/pile-2
megahead merge-datasets --input data/pile --output data/pile-all      (a folder: all it holds, by name)
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
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help=inputs)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="a new dataset")
    parser.add_argument("--overwrite", action="store_true", help="replace an --output that is there already")
    arguments = parser.parse_args()
    prefixes = [prefix for given in arguments.input for prefix in datasets_of(Path(given))]
    with ProgressBar("Merging") as bar:
        merged = merge_datasets(prefixes, arguments.output, overwrite=arguments.overwrite, progress=bar)
    print(
        f"{arguments.output}: {pluralize(len(prefixes), 'dataset')}, {pluralize(len(merged), 'sequence')}, "
        f"{pluralize(merged.num_documents, 'document')}, {pluralize(merged.num_tokens, 'token')}"
    )


def datasets_of(given: Path) -> list[Path]:
    """`given` itself if it is a prefix; of a folder, its datasets' prefixes by name, without held-out parts."""
    if not given.is_dir():
        return [given]
    found = [path.with_suffix("") for path in sorted(given.glob("*.idx")) if not path.stem.endswith("-validation")]
    if not found:
        raise DataError(f"`{given}` must hold datasets (.idx and .bin), but holds none.")
    return found
