"""Builds a text corpus from the documentation that comes with this Python and its installed packages.

Documents are the pages of `demo_pipeline.pages`; a page that mostly repeats earlier ones is dropped
(`demo_pipeline.overlap`). Whole source files are held out, so that a held-out page never has its neighbours in the
training text.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import pydoc_data.topics
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from demo_pipeline.jsonl import write_jsonl
from demo_pipeline.overlap import SeenRuns, runs_of
from demo_pipeline.pages import Page, page, pages_of, reads_well
from megahead.errors import DataError

REPEATED = 0.3  # a page is dropped when this share of its eight-word runs was read before
TESTS = {"test", "tests", "testing", "_tests", "idle_test", "conftest.py"}
COPIES = {"_vendor", "vendor", "vendored", "site-packages", "dist-packages", "__pycache__"}
Runs = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Source:
    """A Python file and the dotted name it is imported by."""

    path: Path
    module: str
    size: int


@dataclass(frozen=True)
class Split:
    """One written file of documents."""

    path: Path
    documents: int
    characters: int


@dataclass(frozen=True)
class Corpus:
    """What was written, how long it took, and how much of the held-out text also stands in the training text."""

    train: Split
    held_out: Split
    repeated_documents: int
    shared_runs: float
    seconds: float

    def summary(self) -> str:
        """One line for the terminal."""
        total = self.train.characters + self.held_out.characters
        documents = self.train.documents + self.held_out.documents
        return (
            f"{documents:,} documents, {total / 1e6:.1f} MB, {total / documents / 1e3:.1f} KB each; "
            f"{self.held_out.documents:,} held out ({self.shared_runs:.1%} of their text also in training)"
        )


def build_corpus(
    folder: Path,
    *,
    roots: Sequence[Path] = (),
    source_bytes: int | None = None,
    held_out: float = 0.04,
    seed: int = 1234,
    workers: int | None = None,
    console: Console | None = None,
) -> Corpus:
    """Writes `folder/train.jsonl` and `folder/held_out.jsonl`, a {"title", "text"} object a line, shuffled.

    The same packages, seed and shares give the same bytes, whatever the number of workers. `roots` defaults to the
    standard library and site-packages; of the files there, as many are read as make `source_bytes`, or all. Raises
    DataError when either file would hold no document.
    """
    start = time.monotonic()
    sources = drawn(find_sources(roots or installed_roots()), source_bytes, seed)
    fresh, repeated = without_repeats(_read(sources, workers or os.cpu_count() or 1, console or Console()))
    fresh.sort(key=lambda item: _draw(seed, item[0].title))
    kept = [item for item in fresh if _draw(seed, item[0].module) >= held_out]
    held = [item for item in fresh if _draw(seed, item[0].module) < held_out]
    if not kept or not held:
        raise DataError(
            f"The documentation of installed packages must fill a training and a held-out file, "
            f"but {len(fresh)} documents were found."
        )
    folder.mkdir(parents=True, exist_ok=True)
    shared = shared_runs([runs for _, runs in kept], [runs for _, runs in held])
    return Corpus(
        train=_write(folder / "train.jsonl", [page for page, _ in kept]),
        held_out=_write(folder / "held_out.jsonl", [page for page, _ in held]),
        repeated_documents=repeated,
        shared_runs=shared,
        seconds=time.monotonic() - start,
    )


def installed_roots() -> list[Path]:
    """Folders of this environment's packages and of the standard library."""
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")))


def find_sources(roots: Iterable[Path]) -> Iterator[Source]:
    """Every Python file below `roots`, but for tests and for copies of other packages."""
    for root in roots:
        for parent, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in TESTS | COPIES and name.isidentifier()]
            for name in files:
                if name.endswith(".py") and name not in TESTS and not name.startswith("test_"):
                    path = Path(parent, name)
                    module = ".".join(path.relative_to(root).with_suffix("").parts)
                    yield Source(path, module, path.stat().st_size)


def drawn(sources: Iterable[Source], most: int | None, seed: int) -> list[Source]:
    """As many of `sources` as have `most` bytes together, drawn by hash, or all of them; in order of their names."""
    found = sorted(sources, key=lambda source: source.module)
    if most is None:
        return found
    by_chance = sorted(found, key=lambda source: _draw(seed + 1, source.module))  # not the draw of what is held out
    totals = itertools.accumulate(source.size for source in by_chance)
    taken = {source.path for source, total in zip(by_chance, totals, strict=True) if total <= most}
    return [source for source in found if source.path in taken]


def without_repeats(pages: Iterable[tuple[Page, Runs]]) -> tuple[list[tuple[Page, Runs]], int]:
    """The pages that say something new, given those before them; and how many were dropped."""
    seen, fresh, dropped = SeenRuns(), [], 0
    for item, runs in pages:
        if seen.share_of(runs) >= REPEATED:
            dropped += 1
        else:
            seen.add(runs)
            fresh.append((item, runs))
    return fresh, dropped


def shared_runs(train: Iterable[Runs], held_out: Sequence[Runs]) -> float:
    """Share of the held-out documents' eight-word runs that stand anywhere in the training documents."""
    seen = SeenRuns()
    for runs in train:
        seen.add(runs)
    counts = [len(runs) for runs in held_out]
    return sum(seen.share_of(runs) * count for runs, count in zip(held_out, counts, strict=True)) / max(1, sum(counts))


def _read(sources: Sequence[Source], workers: int, console: Console) -> Iterator[tuple[Page, Runs]]:
    """All pages in the order of `sources`, then the language reference's topics."""
    columns = (BarColumn(), DownloadColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    progress = Progress(TextColumn("{task.description}"), *columns, console=console)
    with ProcessPoolExecutor(workers, initializer=gc.disable) as pool, progress:  # parsing makes no cycles
        bar = progress.add_task("reading docstrings", total=sum(source.size for source in sources))
        for source, pages in zip(sources, pool.map(_pages_and_runs, sources, chunksize=8), strict=True):
            yield from pages
            progress.advance(bar, source.size)
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        written = page("pydoc_data.topics", f"python.topics.{topic}", text)
        if reads_well(written.text):
            yield written, runs_of(written.text)


def _pages_and_runs(source: Source) -> list[tuple[Page, Runs]]:
    return [(page, runs_of(page.text)) for page in pages_of(source.path, source.module)]


def _draw(seed: int, name: str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _write(path: Path, pages: Sequence[Page]) -> Split:
    write_jsonl(path, ({"title": item.title, "text": item.text} for item in pages))
    return Split(path, len(pages), sum(len(item.text) for item in pages))
