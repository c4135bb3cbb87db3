"""Builds a text corpus from the documentation that comes with this Python and its packages, and a last-word test.

A module or class opens a page with its own docstring; its members follow, each under a line such as `name(arguments)`.
A member with enough to say gets a page of its own instead. Nothing is imported: the text comes from `ast`. A page that
mostly repeats runs of eight words of earlier ones is dropped. Whole source files are held out, so that a held-out page
never has its neighbours in the training text.

The test is made from held-out documents, in the spirit of LAMBADA. Each passage is a few whole sentences that end in a
content word which already occurred in the passage: a reader who followed it can name the word, one who saw only the
last sentence often cannot. A line is {"text": passage}; the word after its last space is the one to predict.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import itertools
import json
import os
import pydoc_data.topics
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megahead.data.writer import ProgressBar
from megahead.errors import DataError
from megahead.files import write_atomically


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replaces `path` by `records`, an object a line, once all of them are on disk."""
    write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


OWN_PAGE = 1000  # characters: a member documented at this length leaves its parent's page
SHORTEST_PAGE = 400  # characters: below this a page says too little
LETTERS = 0.72  # least share of letters and spaces; below it, pages are tables, formulas and dumps of numbers

_TRIPLE_QUOTED = re.compile(rb'("""|\'\'\')(.*?)\1', re.DOTALL)
_ADDS_DOCSTRING = re.compile(r"add_?(new)?_?doc")
_OTHER_THAN_LETTERS = bytes(code for code in range(128) if not chr(code).isalpha() and code != ord(" "))
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Member = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Page:
    """One document: `title`, also its first line, is the qualified name of what `text` describes."""

    module: str
    title: str
    text: str


def pages_of(path: Path, module: str) -> list[Page]:
    """The pages of one source file, in source order; none for a file that does not parse or says too little.

    Files are first weighed by their triple quotes, which costs a hundredth of parsing them.
    """
    source = path.read_bytes()
    if sum(len(match[1]) for match in _TRIPLE_QUOTED.findall(source)) < SHORTEST_PAGE:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found: dict[str, str] = {}
    own = _describe(tree, module, found)
    pages = [page(module, name, text) for name, text in [(module, own), *found.items(), *_attached(tree, module)]]
    return [page for page in pages if reads_well(page.text)]


def page(module: str, name: str, text: str) -> Page:
    """A page with its title line on top, without trailing spaces, runs of empty lines or broken characters."""
    title = name.replace(".__init__", "")
    lines = (line.rstrip() for line in f"{title}\n\n{text}".splitlines())
    clean = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
    return Page(module, title, clean.encode("utf-8", "replace").decode())


def reads_well(text: str) -> bool:
    """Whether a page is long enough, and words more than symbols."""
    squeezed = " ".join(text.split()).encode()
    letters = len(squeezed.translate(None, delete=_OTHER_THAN_LETTERS))
    return len(squeezed) >= SHORTEST_PAGE and letters >= LETTERS * len(squeezed)


def _describe(node: ast.Module | _Member, name: str, found: dict[str, str]) -> str:
    """What `node` and its smaller members say; larger members go to `found`, by qualified name."""
    parts = [ast.get_docstring(node) or ""]
    members = [] if isinstance(node, _Function) else [child for child in node.body if isinstance(child, _Member)]
    for child in members:
        text = _describe(child, f"{name}.{child.name}", found)
        if len(text) >= OWN_PAGE:
            found[f"{name}.{child.name}"] = text
        elif text:
            indented = (f"    {line}" if line else "" for line in text.splitlines())
            parts.append("\n".join([_signature(child), *indented]))
    return "\n\n".join(part for part in parts if part)


def _signature(node: _Member) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
    return f"{node.name}({', '.join(names)})"


def _attached(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Name and text of docstrings given to compiled objects, as in `add_docstr(torch.abs, "...")`."""
    for statement in tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or not _ADDS_DOCSTRING.search(ast.unparse(call.func)):
            continue
        strings = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and type(node.value) is str]
        targets = [ast.unparse(argument).strip("'") for argument in call.args]
        names = [target for target in targets if re.fullmatch(r"[\w.]{1,80}", target)]
        if names and strings:
            name = names[-1] if "." in names[-1] else f"{module}.{names[-1]}"
            yield name, inspect.cleandoc(max(strings, key=len))


RUN = 8
_WORD = re.compile(r"[a-z0-9]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def ngram_hashes(text: str) -> npt.NDArray[np.uint64]:
    """One hash for every run of eight consecutive words, repeats removed, sorted; empty for a shorter text."""
    words = np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())], dtype=np.uint64)
    if len(words) < RUN:
        return np.empty(0, dtype=np.uint64)
    count = len(words) - RUN + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for k in range(RUN):
        hashes = (hashes ^ words[k : k + count]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


class NgramFilter:
    """The runs of every text added so far, as a filter of 2^29 bits (64 MiB): no more memory for more text.

    A run never added is reported as seen with probability (runs added) / 2^29: about 1 % for 40 MB of text.
    """

    BITS = 29

    def __init__(self) -> None:
        self._bits = np.zeros(1 << (self.BITS - 3), dtype=np.uint8)

    def add(self, runs: npt.NDArray[np.uint64]) -> None:
        """Remembers `runs`."""
        slots = runs >> np.uint64(64 - self.BITS)
        np.bitwise_or.at(self._bits, slots >> np.uint64(3), _bit(slots))

    def share_of(self, runs: npt.NDArray[np.uint64]) -> float:
        """The share of `runs` that was added before; 0 for none."""
        if not len(runs):
            return 0.0
        slots = runs >> np.uint64(64 - self.BITS)
        return float(np.mean((self._bits[slots >> np.uint64(3)] & _bit(slots)) != 0))


def _bit(slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (slots & np.uint64(7)).astype(np.uint8))


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
class Corpus:
    """What was written, and how much of the held-out text also stands in the training text."""

    documents: int
    held_out_documents: int
    characters: int
    repeated_documents: int
    shared_runs: float

    def summary(self) -> str:
        """One line for the terminal."""
        size = f"{self.characters / 1e6:.1f} MB, {self.characters / self.documents / 1e3:.1f} KB each"
        held_out = f"{self.held_out_documents:,} held out ({self.shared_runs:.1%} of their text also in training)"
        return f"{self.documents:,} documents, {size}; {held_out}"


def build_corpus(
    folder: Path,
    *,
    roots: Sequence[Path] = (),
    source_bytes: int | None = None,
    held_out: float = 0.04,
    seed: int = 1234,
    workers: int | None = None,
) -> Corpus:
    """Writes `folder/train.jsonl` and `folder/held_out.jsonl`, a {"title", "text"} object a line, shuffled.

    The same packages, seed and shares give the same bytes, whatever the number of workers. `roots` defaults to the
    standard library and site-packages; of the files there, as many are read as make `source_bytes`, or all. Raises
    DataError when either file would hold no document.
    """
    installed = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    sources = drawn(find_sources(roots or installed), source_bytes, seed)
    fresh, repeated = without_repeats(_read(sources, workers or os.cpu_count() or 1))
    fresh.sort(key=lambda item: _draw(seed, item[0].title))
    kept = [item for item in fresh if _draw(seed, item[0].module) >= held_out]
    held = [item for item in fresh if _draw(seed, item[0].module) < held_out]
    if not kept or not held:
        raise DataError(
            f"The documentation of installed packages must fill a training and a held-out file, "
            f"but {len(fresh)} documents were found."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, pages in (("train", kept), ("held_out", held)):
        write_jsonl(folder / f"{name}.jsonl", ({"title": item.title, "text": item.text} for item, _ in pages))
    characters = sum(len(item.text) for item, _ in fresh)
    shared = shared_runs([runs for _, runs in kept], [runs for _, runs in held])
    return Corpus(len(fresh), len(held), characters, repeated, shared)


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
    seen, fresh, dropped = NgramFilter(), [], 0
    for item, runs in pages:
        if seen.share_of(runs) >= REPEATED:
            dropped += 1
        else:
            seen.add(runs)
            fresh.append((item, runs))
    return fresh, dropped


def shared_runs(train: Iterable[Runs], held_out: Sequence[Runs]) -> float:
    """Share of the held-out documents' eight-word runs that stand anywhere in the training documents."""
    seen = NgramFilter()
    for runs in train:
        seen.add(runs)
    counts = [len(runs) for runs in held_out]
    return sum(seen.share_of(runs) * count for runs, count in zip(held_out, counts, strict=True)) / max(1, sum(counts))


def _read(sources: Sequence[Source], workers: int) -> Iterator[tuple[Page, Runs]]:
    """All pages in the order of `sources`, then the language reference's topics."""
    pool_of_workers = ProcessPoolExecutor(workers, initializer=gc.disable)  # parsing makes no cycles
    with pool_of_workers as pool, ProgressBar("Reading docstrings") as bar:
        bar.start(sum(source.size for source in sources))
        for source, pages in zip(sources, pool.map(_pages_and_runs, sources, chunksize=8), strict=True):
            yield from pages
            bar.advance(source.size, sum(len(page.text) for page, _ in pages))
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        written = page("pydoc_data.topics", f"python.topics.{topic}", text)
        if reads_well(written.text):
            yield written, ngram_hashes(written.text)


def _pages_and_runs(source: Source) -> list[tuple[Page, Runs]]:
    return [(page, ngram_hashes(page.text)) for page in pages_of(source.path, source.module)]


def _draw(seed: int, name: str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


WORDS = range(30, 81)  # length of a passage
PER_DOCUMENT = 4  # passages from one document at most
_LATIN = re.compile(r"[A-Za-z]+")
_SENTENCE_START = re.compile(r"(?<=[\w)`'\"][.!?])\s+(?=[A-Z`])")
_CLAUSE_END = re.compile(r"(?<=[a-z])(?=[,;:.!?](\s|$))")
_NOT_PROSE = re.compile(r"[|\\{}~^=<>]|--|\*\*|\.\.|\]\(| : |::|https?:|\w\)?: \w|:$|^\W*\w+\(")
_FUNCTION_WORDS = """
about above after also because been before being below between both does each either every false from given have
here however instead into itself like make many more most must need none note only other over same should since some
such than that their them then there these they this those through true under until used using very well were what
when where whether which while will with within without would your
"""


def build_cloze(documents: Path, output: Path, *, limit: int = 1000, seed: int = 1234) -> int:
    """Writes up to `limit` passages from a jsonl of {"text"} documents and returns how many.

    Chosen by hash: the same documents and seed give the same file. Raises DataError when no passage is found.
    """
    with documents.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    by_chance = partial(_draw, seed)
    drawn = {one for text in texts for one in sorted(passages_of(text), key=by_chance)[:PER_DOCUMENT]}
    passages = sorted(drawn, key=by_chance)[:limit]
    if not passages:
        raise DataError(f"{documents} must hold prose that ends in a repeated word, but gives no cloze passage.")
    write_jsonl(output, ({"text": passage} for passage in passages))
    return len(passages)


def passages_of(text: str) -> Iterator[str]:
    """Every passage of one document that may serve: from the start of a sentence to the end of a clause."""
    for prose in _prose(text):
        starts = [0, *(match.end() for match in _SENTENCE_START.finditer(prose))]
        for clause in _CLAUSE_END.finditer(prose):
            passages = (prose[start : clause.start()] for start in reversed(starts) if start < clause.start())
            fitting = (passage for passage in passages if len(passage.split()) in WORDS and is_answerable(passage))
            yield from itertools.islice(fitting, 1)


def is_answerable(passage: str) -> bool:
    """Whether the last word is a content word that occurs before, though not right before."""
    before, _, answer = passage.rpartition(" ")
    words = _LATIN.findall(before)
    content = len(answer) >= 4 and answer.isalpha() and answer.islower() and answer not in _FUNCTION_WORDS.split()
    return content and answer in words[:-1]


def _prose(text: str) -> Iterator[str]:
    """Runs of neighbouring paragraphs that are plain sentences, each run on one line."""
    run: list[str] = []
    blocks = itertools.groupby(text.splitlines(), key=lambda line: (not line, len(line) - len(line.lstrip())))
    joined = (" ".join(" ".join(lines).split()) for _, lines in blocks)  # of one indentation, without empty lines
    for paragraph in [*filter(None, joined), ""]:
        if paragraph[:1].isupper() and paragraph.endswith((".", "!", "?")) and not _NOT_PROSE.search(paragraph):
            run.append(paragraph)
        elif run:
            yield " ".join(run)
            run = []
