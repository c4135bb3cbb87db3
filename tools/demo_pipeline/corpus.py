"""Builds a text corpus from the docstrings of this Python and its packages, and a last-word test.

A module or class starts a page with its docstring; its members follow, each under a line `name(arguments)`. A member
with a long docstring gets its own page instead. Nothing is imported: the text comes from `ast`. A page is dropped if
many of its word 8-grams occurred in earlier pages. Whole source files are held out, so that pages of one file are never
split between training and held-out text.

The test is made from held-out documents, like LAMBADA. Each passage is a few sentences up to a content word that occurs
earlier in the passage: the context predicts the word better than the last sentence alone does. A line is
{"text": passage}; the word after its last space is the one to predict.
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
    """Writes `records` to `path` atomically, one JSON object a line."""
    write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


MIN_OWN_PAGE = 1000  # characters: a member with a docstring of this length gets its own page
MIN_PAGE = 400  # characters
MIN_LETTER_SHARE = 0.72  # of letters and spaces; pages below are tables, formulas and dumps of numbers

_TRIPLE_QUOTED = re.compile(rb'("""|\'\'\')(.*?)\1', re.DOTALL)
_ADDS_DOCSTRING = re.compile(r"add_?(new)?_?doc")
_NON_LETTERS = bytes(code for code in range(128) if not chr(code).isalpha() and code != ord(" "))
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_MemberNode = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Page:
    """One document; `title`, also the first line of `text`, is the qualified name of the object that it describes."""

    module: str
    title: str
    text: str


def extract_pages(path: Path, module: str) -> list[Page]:
    """The pages of one source file, in source order; none for a file that does not parse or has too little text.

    Files with little triple-quoted text are skipped before parsing, which takes a hundred times as long.
    """
    source = path.read_bytes()
    if sum(len(match[1]) for match in _TRIPLE_QUOTED.findall(source)) < MIN_PAGE:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other packages
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    text_by_name: dict[str, str] = {}
    module_text = _collect_text(tree, module, text_by_name)
    named_texts = [(module, module_text), *text_by_name.items(), *_attached_docstrings(tree, module)]
    pages = [make_page(module, name, text) for name, text in named_texts]
    return [page for page in pages if is_readable(page.text)]


def make_page(module: str, name: str, text: str) -> Page:
    """A page with its title line on top, without trailing spaces, runs of empty lines or broken characters."""
    title = name.replace(".__init__", "")
    lines = (line.rstrip() for line in f"{title}\n\n{text}".splitlines())
    clean = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
    return Page(module, title, clean.encode("utf-8", "replace").decode())


def is_readable(text: str) -> bool:
    """Whether a page is long enough and consists mostly of letters."""
    text_bytes = " ".join(text.split()).encode()
    letters = len(text_bytes.translate(None, delete=_NON_LETTERS))
    return len(text_bytes) >= MIN_PAGE and letters >= MIN_LETTER_SHARE * len(text_bytes)


def _collect_text(node: ast.Module | _MemberNode, name: str, text_by_name: dict[str, str]) -> str:
    """The docstrings of `node` and its smaller members; adds larger members to `text_by_name`, by qualified name."""
    parts = [ast.get_docstring(node) or ""]
    body = [] if isinstance(node, _FunctionNode) else node.body
    members = [child for child in body if isinstance(child, _MemberNode)]
    for child in members:
        text = _collect_text(child, f"{name}.{child.name}", text_by_name)
        if len(text) >= MIN_OWN_PAGE:
            text_by_name[f"{name}.{child.name}"] = text
        elif text:
            indented = (f"    {line}" if line else "" for line in text.splitlines())
            parts.append("\n".join([_signature(child), *indented]))
    return "\n\n".join(part for part in parts if part)


def _signature(node: _MemberNode) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
    return f"{node.name}({', '.join(names)})"


def _attached_docstrings(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Name and text of docstrings of compiled objects: `add_docstr(torch.abs, "...")`."""
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


NGRAM_SIZE = 8
_WORD = re.compile(r"[a-z0-9]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
NgramHashes = npt.NDArray[np.uint64]


def ngram_hashes(text: str) -> NgramHashes:
    """The distinct hashes of a text's word 8-grams, sorted; empty for a shorter text."""
    words = np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())], dtype=np.uint64)
    if len(words) < NGRAM_SIZE:
        return np.empty(0, dtype=np.uint64)
    count = len(words) - NGRAM_SIZE + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for k in range(NGRAM_SIZE):
        hashes = (hashes ^ words[k : k + count]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


class NgramFilter:
    """A Bloom filter (one hash, 2^29 bits, 64 MiB) of the n-grams added so far.

    The false positive rate is (n-grams added) / 2^29: about 1 % for 40 MB of text.
    """

    BITS = 29

    def __init__(self) -> None:
        self._bits = np.zeros(1 << (self.BITS - 3), dtype=np.uint8)

    def add(self, ngrams: NgramHashes) -> None:
        """Adds `ngrams`."""
        byte_indices, masks = self._locate(ngrams)
        np.bitwise_or.at(self._bits, byte_indices, masks)

    def seen_share(self, ngrams: NgramHashes) -> float:
        """The share of `ngrams` added before; 0 if empty."""
        byte_indices, masks = self._locate(ngrams)
        return float(np.mean((self._bits[byte_indices] & masks) != 0)) if len(ngrams) else 0.0

    def _locate(self, ngrams: NgramHashes) -> tuple[NgramHashes, npt.NDArray[np.uint8]]:
        """The byte and the bit of each n-gram."""
        slots = ngrams >> np.uint64(64 - self.BITS)
        return slots >> np.uint64(3), np.left_shift(np.uint8(1), (slots & np.uint64(7)).astype(np.uint8))


MAX_REPEATED_SHARE = 0.3  # a page is dropped if this share of its n-grams occurred before
TEST_NAMES = {"test", "tests", "testing", "_tests", "idle_test", "conftest.py"}
VENDORED_NAMES = {"_vendor", "vendor", "vendored", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """A Python file and the dotted name it is imported by."""

    path: Path
    module: str
    size: int


@dataclass(frozen=True)
class Corpus:
    """Statistics of a corpus; `shared_ngrams`: share of held-out n-grams that occur in the training text."""

    documents: int
    held_out_documents: int
    characters: int
    repeated_documents: int
    shared_ngrams: float

    def summary(self) -> str:
        """One line for the terminal."""
        size = f"{self.characters / 1e6:.1f} MB, {self.characters / self.documents / 1e3:.1f} KB each"
        held_out = f"{self.held_out_documents:,} held out ({self.shared_ngrams:.1%} of their text also in training)"
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

    The same packages and arguments give the same bytes, whatever the number of workers. `roots` defaults to the
    standard library and site-packages; `source_bytes` of their files are read, or all. DataError if a file would be
    empty.
    """
    installed = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    sources = sample_sources(find_sources(roots or installed), source_bytes, seed)
    pages, repeated = drop_repeated(_read_pages(sources, workers or os.cpu_count() or 1))
    pages.sort(key=lambda page: _hash_uniform(seed, page[0].title))
    train = [page for page in pages if _hash_uniform(seed, page[0].module) >= held_out]
    held_out_pages = [page for page in pages if _hash_uniform(seed, page[0].module) < held_out]
    if not train or not held_out_pages:
        raise DataError(
            "The documentation of installed packages must fill a training and a held-out file, but "
            f"{len(pages)} documents were found."
        )
    for name, split in (("train", train), ("held_out", held_out_pages)):
        write_jsonl(folder / f"{name}.jsonl", ({"title": page.title, "text": page.text} for page, _ in split))
    characters = sum(len(page.text) for page, _ in pages)
    shared = shared_share([ngrams for _, ngrams in train], [ngrams for _, ngrams in held_out_pages])
    return Corpus(len(pages), len(held_out_pages), characters, repeated, shared)


def find_sources(roots: Iterable[Path]) -> Iterator[Source]:
    """Every Python file below `roots`, except tests and vendored packages."""
    for root in roots:
        for parent, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in TEST_NAMES | VENDORED_NAMES and name.isidentifier()]
            for name in files:
                if name.endswith(".py") and name not in TEST_NAMES and not name.startswith("test_"):
                    path = Path(parent, name)
                    module = ".".join(path.relative_to(root).with_suffix("").parts)
                    yield Source(path, module, path.stat().st_size)


def sample_sources(sources: Iterable[Source], max_bytes: int | None, seed: int) -> list[Source]:
    """`sources` chosen by hash, at most `max_bytes` in total (None: all of them); sorted by module."""
    by_name = sorted(sources, key=lambda source: source.module)
    if max_bytes is None:
        return by_name
    # seed + 1: independent of the held-out split
    shuffled = sorted(by_name, key=lambda source: _hash_uniform(seed + 1, source.module))
    totals = itertools.accumulate(source.size for source in shuffled)
    selected = {source.path for source, total in zip(shuffled, totals, strict=True) if total <= max_bytes}
    return [source for source in by_name if source.path in selected]


def drop_repeated(pages: Iterable[tuple[Page, NgramHashes]]) -> tuple[list[tuple[Page, NgramHashes]], int]:
    """Drops pages that mostly repeat earlier ones; returns the rest, and how many were dropped."""
    seen, kept, dropped = NgramFilter(), [], 0
    for page, ngrams in pages:
        if seen.seen_share(ngrams) >= MAX_REPEATED_SHARE:
            dropped += 1
        else:
            seen.add(ngrams)
            kept.append((page, ngrams))
    return kept, dropped


def shared_share(train: Iterable[NgramHashes], held_out: Sequence[NgramHashes]) -> float:
    """Share of the held-out documents' n-grams that occur in the training documents."""
    seen = NgramFilter()
    for ngrams in train:
        seen.add(ngrams)
    counts = [len(ngrams) for ngrams in held_out]
    shared = sum(seen.seen_share(ngrams) * count for ngrams, count in zip(held_out, counts, strict=True))
    return shared / max(1, sum(counts))


def _read_pages(sources: Sequence[Source], workers: int) -> Iterator[tuple[Page, NgramHashes]]:
    """Yields all pages in the order of `sources`, then the language reference's topics."""
    executor = ProcessPoolExecutor(workers, initializer=gc.disable)  # parsing creates no reference cycles
    with executor as pool, ProgressBar("Reading docstrings") as bar:
        bar.start(sum(source.size for source in sources))
        for source, pages in zip(sources, pool.map(_pages_and_ngrams, sources, chunksize=8), strict=True):
            yield from pages
            bar.advance(source.size, sum(len(page.text) for page, _ in pages))
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        page = make_page("pydoc_data.topics", f"python.topics.{topic}", text)
        if is_readable(page.text):
            yield page, ngram_hashes(page.text)


def _pages_and_ngrams(source: Source) -> list[tuple[Page, NgramHashes]]:
    return [(page, ngram_hashes(page.text)) for page in extract_pages(source.path, source.module)]


def _hash_uniform(seed: int, name: str) -> float:
    """A number in [0, 1) that depends only on the arguments."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


PASSAGE_WORDS = range(30, 81)  # length of a passage
MAX_PER_DOCUMENT = 4  # passages
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

    Passages are sampled by hash: the same documents and seed give the same file. DataError if there is no passage.
    """
    with documents.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    by_hash = partial(_hash_uniform, seed)
    candidates = {passage for text in texts for passage in sorted(find_passages(text), key=by_hash)[:MAX_PER_DOCUMENT]}
    passages = sorted(candidates, key=by_hash)[:limit]
    if not passages:
        raise DataError(f"{documents} must hold prose that ends in a repeated word, but gives no cloze passage.")
    write_jsonl(output, ({"text": passage} for passage in passages))
    return len(passages)


def find_passages(text: str) -> Iterator[str]:
    """Every suitable passage of one document, from the start of a sentence to the end of a clause."""
    for prose in _prose(text):
        starts = [0, *(match.end() for match in _SENTENCE_START.finditer(prose))]
        for clause in _CLAUSE_END.finditer(prose):
            passages = (prose[start : clause.start()] for start in reversed(starts) if start < clause.start())
            sized = (passage for passage in passages if len(passage.split()) in PASSAGE_WORDS)
            yield from itertools.islice(filter(is_answerable, sized), 1)


def is_answerable(passage: str) -> bool:
    """Whether the last word is a content word that also occurs somewhere before the word that precedes it."""
    before, _, answer = passage.rpartition(" ")
    words = _LATIN.findall(before)
    content = len(answer) >= 4 and answer.isalpha() and answer.islower() and answer not in _FUNCTION_WORDS.split()
    return content and answer in words[:-1]


def _prose(text: str) -> Iterator[str]:
    """Yields each run of consecutive paragraphs of plain sentences, joined to one line."""
    run: list[str] = []
    blocks = itertools.groupby(text.splitlines(), key=lambda line: (not line, len(line) - len(line.lstrip())))
    joined = (" ".join(" ".join(lines).split()) for _, lines in blocks)  # of one indentation, without empty lines
    for paragraph in [*filter(None, joined), ""]:
        if paragraph[:1].isupper() and paragraph.endswith((".", "!", "?")) and not _NOT_PROSE.search(paragraph):
            run.append(paragraph)
        elif run:
            yield " ".join(run)
            run = []
