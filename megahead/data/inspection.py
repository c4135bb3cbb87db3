"""Surveys text before it is preprocessed; inspects, verifies and merges indexed datasets."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from megahead.data.compression import ARCHIVES
from megahead.data.indexed import (
    UINT16_VOCABULARY_LIMIT,
    Array,
    IndexedDataset,
    dataset_paths,
    require_same_tokenizer,
)
from megahead.data.records import Selection, TextFile, is_saved_dataset
from megahead.data.sources import CHUNKERS, SUFFIXES, Input, files_below, find_inputs, read_chunks
from megahead.data.tokenizer import Tokenizer
from megahead.data.writer import NO_PROGRESS, IndexedDatasetWriter, ProgressBar
from megahead.errors import DataError, FieldError
from megahead.wording import format_names, pluralize

MAX_DOCUMENTS_READ = 1000


@dataclass(frozen=True)
class Inspection:
    """A dataset and how often each id occurs in it."""

    dataset: IndexedDataset
    counts: Array
    """int64 [ids]."""

    verified: bool
    """Whether the files were read and have the checksums recorded when they were made."""

    @cached_property
    def used_ids(self) -> Array:
        """The ids that occur, increasing."""
        return np.flatnonzero(self.counts)

    def sequence(self, i: int) -> Array:
        """Sequence i; FieldError if there is none."""
        if not 0 <= i < len(self.dataset):
            rule = f"be at least 0 and below their number ({pluralize(len(self.dataset), 'sequence')})"
            raise FieldError("--sequence", rule, got=i)
        return self.dataset[i]

    def count_end_tokens(self, end_token: int) -> int:
        """How often `end_token` occurs."""
        return int(self.counts[end_token]) if 0 <= end_token < len(self.counts) else 0

    def warnings(self, end_token: int, tokenizer: Tokenizer | None = None) -> list[str]:
        """One sentence for each problem that training would not notice; `tokenizer`: the one to show the text with."""
        findings = []
        if not self.dataset.num_tokens:
            findings.append("there is no token: it cannot be trained on, and a merge leaves it out.")
        ends = self.count_end_tokens(end_token)
        documents = int((np.diff(self.dataset.document_boundaries()) > 0).sum())  # an empty one needs no end
        if self.dataset.num_tokens and ends < max(documents, 1):
            often = f"occurs {ends:,} times in {documents:,} documents" if ends else "never occurs"
            findings.append(
                f"the end token {end_token} {often}: documents that share a row cannot be separated "
                "(tokenized without end tokens, or another id closes them)."
            )
        if tokenizer is not None and len(self.used_ids) and self.used_ids[-1] >= tokenizer.vocab_size:
            findings.append(
                f"id {self.used_ids[-1]} occurs, but the tokenizer ends at {tokenizer.vocab_size - 1}: "
                "the dataset was made with another one."
            )
        identity = self.dataset.tokenizer_identity()
        if tokenizer is not None and identity is not None and identity.vocabulary != tokenizer.identity().vocabulary:
            given = tokenizer.identity()
            findings.append(f"the dataset was tokenized by {identity}, not by {given}: ids may mean other tokens.")
        empty = int((self.dataset.sizes == 0).sum())
        if empty:
            findings.append(f"{pluralize(empty, 'sequence')} without a token.")
        return findings

    def describe_last_ids(self) -> str:
        """The most frequent last ids of documents, in a sample of evenly spaced documents."""
        count = self.dataset.num_documents
        sample = range(0, count, max(1, count // MAX_DOCUMENTS_READ))
        last_ids = Counter(int(text[-1]) for text in map(self.dataset.document, sample) if len(text))
        most_common = [f"id {id_} ({times / last_ids.total():.1%})" for id_, times in last_ids.most_common(3)]
        others = f" and {len(last_ids) - 3:,} others" if len(last_ids) > 3 else ""
        return f"{', '.join(most_common)}{others}" if most_common else "no id: none is listed"

    def histogram(self) -> list[tuple[str, int]]:
        """(range of lengths, number of sequences). Each range is twice as wide as the one before; empty ranges at both
        ends are left out."""
        bins = np.bincount(np.frexp(self.dataset.sizes)[1], minlength=1)  # 0 | 1 | 2-3 | 4-7 | ...
        (filled,) = np.nonzero(bins)
        span = range(filled[0], filled[-1] + 1) if len(filled) else range(0)
        return [(f"{(1 << b) >> 1:,} to {(1 << b) - 1:,}" if b > 1 else str(b), int(bins[b])) for b in span]

    def facts(self, end_token: int) -> list[tuple[str, str]]:
        """(name, value) rows to print."""
        dataset, info, used = self.dataset, self.dataset.info, self.used_ids
        end_share = self.count_end_tokens(end_token) / max(dataset.num_tokens, 1)
        rows = [
            ("sequences", f"{len(dataset):,}"),
            ("documents", f"{dataset.num_documents:,}" if dataset.num_documents else "not listed (preshuffled rows)"),
            ("tokens", f"{dataset.num_tokens:,} ({dataset.dtype.name})"),
            ("lengths", _lengths(dataset.sizes)),
            ("ids used", f"{len(used):,}, from {used[0]} to {used[-1]}" if len(used) else "none"),
            ("end tokens", f"{end_share:.4%} of the tokens (id {end_token})"),
            ("documents end in", self.describe_last_ids()),
            ("checksums", "match" if self.verified else "none recorded" if info is None else "not compared"),
        ]
        if info is not None:
            per_token = info.text_bytes / max(info.tokens, 1)
            rows.append(("text", f"{pluralize(info.text_bytes, 'byte')}, {per_token:.2f} a token"))
            rows.append(("tokenizer", f"{info.tokenizer or 'unknown'}, {info.vocab_size:,} ids"))
        return rows


def inspect_dataset(prefix: str | Path, *, verify: bool = True, progress: ProgressBar = NO_PROGRESS) -> Inspection:
    """Inspects a dataset. With `verify` reads all of it and compares checksums, lengths and offsets.

    DataError if one of them does not match. If there is no `PREFIX.json`, reads all tokens to count them.
    """
    dataset = IndexedDataset(prefix)
    info = dataset.info
    files = [] if info is None or not verify else [(dataset.bin_path, info.bin), (dataset.idx_path, info.idx)]
    progress.start(sum(fingerprint.bytes for _, fingerprint in files) or dataset.num_tokens * dataset.dtype.itemsize)
    for path, fingerprint in files:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                progress.advance(len(block), len(block))
        if digest.hexdigest() != fingerprint.sha256:
            raise DataError(
                f"`{path}` must have the SHA-256 {fingerprint.sha256} recorded when it was made, but has "
                f"{digest.hexdigest()} instead; it was damaged or changed since."
            )
    if verify:
        require_contiguous(dataset)
    counts = count_tokens(dataset, progress) if info is None else np.array(info.token_counts, np.int64)
    return Inspection(dataset, counts, verified=bool(files))


def require_contiguous(dataset: IndexedDataset) -> None:
    """DataError when the sequences do not follow each other in the `.bin` file without gaps. Reads the index."""
    (misplaced,) = np.nonzero(dataset.offsets != dataset.sequence_boundaries()[:-1] * dataset.dtype.itemsize)
    if len(misplaced):
        raise DataError(
            f"the sequences in `{dataset.idx_path}` must lie back to back in the `.bin` file, but sequence "
            f"{misplaced[0]} does not; it is damaged."
        )


def count_tokens(dataset: IndexedDataset, progress: ProgressBar = NO_PROGRESS) -> Array:
    """How often each id occurs, int64 [largest id in the text + 1]. Reads all tokens. DataError for a negative id."""
    counts = np.zeros(0, np.int64)
    for block in dataset.blocks():
        if block.min() < 0:
            raise DataError(f"token ids must not be negative, but `{dataset.bin_path}` holds {block.min()}.")
        block_counts = np.bincount(block, minlength=len(counts))
        block_counts[: len(counts)] += counts
        counts = block_counts
        progress.advance(block.nbytes, block.nbytes)
    return counts


def _lengths(sizes: Array) -> str:
    if not len(sizes):
        return "none"
    low, middle, high = np.percentile(sizes, [1, 50, 99])
    return (
        f"{sizes.min():,} to {sizes.max():,}, mean {sizes.mean():,.1f}, median {middle:,.0f}, "
        f"1 % below {low:,.0f}, 1 % above {high:,.0f}"
    )


def merge_datasets(
    prefixes: Sequence[str | Path], output: str | Path, *, overwrite: bool = False, progress: ProgressBar = NO_PROGRESS
) -> IndexedDataset:
    """Writes the sequences and documents of all `prefixes`, in order, to `output`, which appears complete or not at
    all.

    Document boundaries are kept as they are, also if a document has several sequences, or if the index lists none at
    all (preshuffled rows). Memory: some 100 MB, and the index arrays. DataError if token types or vocabularies differ,
    if only some of them list documents, if none has a token, if `output` is one of `prefixes`, or (unless `overwrite`)
    if it exists.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    _require_compatible(datasets, output)
    for existing in filter(Path.exists, dataset_paths(output)):
        if not overwrite:
            raise DataError(f"`{existing}` must not exist yet, but does; name another --output, or add --overwrite.")
    progress.start(sum(dataset.num_tokens * dataset.dtype.itemsize for dataset in datasets))
    infos = [dataset.info for dataset in datasets]
    tokenizers = [None if info is None else info.tokenizer_identity() or info.tokenizer for info in infos]
    vocab_size = max(map(_vocab_size, datasets))
    tokenizer = tokenizers[0] if len(set(map(str, tokenizers))) == 1 else None
    file = next((path for dataset in datasets if tokenizer and (path := dataset.tokenizer_path())), None)
    end = next((info.end_token for info in infos if info and info.end_token is not None), None)
    sources = [source for info in infos if info is not None and (source := info.source)]
    source = format_names(sources) if len(sources) == len(infos) else None
    with IndexedDatasetWriter(
        output, vocab_size=vocab_size, tokenizer=tokenizer, tokenizer_file=file, end_token=end, source=source
    ) as writer:
        for dataset in datasets:
            require_contiguous(dataset)
            nothing = np.empty(0, np.int64)
            for tokens in dataset.blocks():
                writer.add_documents(tokens, nothing, sequences=nothing)
                progress.advance(tokens.nbytes, tokens.nbytes)
            writer.add_documents(nothing, dataset.sizes, sequences=np.diff(dataset.document_index))
        text_bytes = [dataset.info.text_bytes if dataset.info else 0 for dataset in datasets if dataset.num_tokens]
        writer.text_bytes = sum(text_bytes) if all(text_bytes) else 0  # unknown if one of them is
    return IndexedDataset(output)


def _require_compatible(datasets: Sequence[IndexedDataset], output: str | Path) -> None:
    if not datasets:
        raise DataError("there must be at least one dataset to merge, but none was given.")
    if dataset_paths(output)[0].resolve() in {dataset.bin_path.resolve() for dataset in datasets}:
        raise DataError(f"the output must be a new dataset, but `{output}` is one of those to merge.")
    identities = {f"`{dataset.prefix}`": dataset.tokenizer_identity() for dataset in datasets if len(dataset)}
    require_same_tokenizer(identities)
    properties: dict[str, list[object]] = {
        "token types": [dataset.dtype.name for dataset in datasets],
        "vocabulary sizes": [dataset.info and dataset.info.vocab_size for dataset in datasets],
        "end tokens": [dataset.info and dataset.info.end_token for dataset in datasets],
        "kinds of rows": ["of documents" if dataset.num_documents else "preshuffled" for dataset in datasets],
    }
    for name, values in properties.items():
        pairs = zip(values, datasets, strict=True)
        known = [(value, dataset) for value, dataset in pairs if value is not None and len(dataset)]
        for value, dataset in known[1:]:
            if value != known[0][0]:
                raise DataError(
                    f"datasets to merge must have equal {name}, but `{known[0][1].prefix}` has {known[0][0]} and "
                    f"`{dataset.prefix}` {value}; make them the same way."
                )


def _vocab_size(dataset: IndexedDataset) -> int:
    """The vocabulary size in `PREFIX.json`, else the smallest that covers the ids and gives the same token type."""
    if dataset.info is not None:
        return dataset.info.vocab_size
    min_size = 1 if dataset.dtype == np.uint16 else UINT16_VOCABULARY_LIMIT
    return max(min_size, len(count_tokens(dataset)))


# The survey of a folder of text: which files can be read, and which keys have the text.

MAX_SKIPPED_LINES = 5
PREFERRED_KEYS = ("text", "content")
"""A file's text is under the first of these keys that it has, else under the key with the most characters."""


@dataclass(frozen=True)
class TextSurvey:
    """What `megahead start` found in a folder or file."""

    name: str
    """Name of the folder or file, without its path."""

    inputs: list[Input]
    keys: tuple[str, ...]
    """Keys of the text in records, as in `Selection`; empty if no input has records."""

    skipped: dict[Path, str]
    """Files that are left out, with the reason."""

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(item.bytes for item in self.inputs)

    def selection(self) -> Selection:
        return Selection(self.keys or "text")

    def text_bytes(self) -> float:
        """Approximate bytes of text: three times the size of a compressed file."""
        return sum(item.bytes * (3 if item.path.suffix in (".gz", ".zst", ".parquet") else 1) for item in self.inputs)

    def has_fewer_documents(self, limit: int) -> bool:
        """Whether there are fewer than `limit` documents; stops reading there."""
        chunks = read_chunks(self.inputs, self.selection())
        texts = chain.from_iterable(chunk.parse().texts for chunk in chunks)
        return sum(1 for _ in islice(texts, limit)) < limit

    def lines(self) -> list[str]:
        """The survey in lines for a terminal."""
        types = Counter(map(_type_name, self.inputs))
        summary = ", ".join(pluralize(number, name) for name, number in types.most_common())
        keys = f"; in records the text is in {' or '.join(f'`{key}`' for key in self.keys)}" if self.keys else ""
        skipped = [f"{file} {reason}" for file, reason in list(self.skipped.items())[:MAX_SKIPPED_LINES]]
        if (more := len(self.skipped) - MAX_SKIPPED_LINES) > 0:
            skipped.append(f"and {pluralize(more, 'other file')}")
        lines = [("text", f"{summary}, {self.bytes / 1e6:,.1f} MB{keys}")]
        lines += [("left out" if not n else "", line) for n, line in enumerate(skipped)]
        return [f"{name:<12}{line}".encode(errors="backslashreplace").decode() for name, line in lines]  # to be printed


def survey(path: Path, exclude: Path | None = None) -> TextSurvey:
    """Surveys a file, or the files below a folder except those below `exclude`; DataError if none has text."""
    if not path.exists():
        raise DataError(f"`{path}` must be a folder or file of text, but does not exist; check the path.")
    readable, unknown = _files(path, exclude)
    skipped = dict.fromkeys(unknown, f"does not end in {SUFFIXES}")
    inputs, bytes_by_key = list[Input](), Counter[str]()
    for file in readable:
        try:
            (item,) = find_inputs(file)
            characters = _characters_by_key(item)
        except DataError as error:
            skipped[file] = re.sub("^`[^`]*` ", "", str(error)).rstrip(".")  # without the path
            continue
        if not characters:
            skipped[file] = "has no text"
            continue
        inputs.append(item)
        key = next((key for key in PREFERRED_KEYS if characters[key]), characters.most_common(1)[0][0])
        bytes_by_key[key] += item.bytes
    if not inputs:
        first = next((f"`{file}` {reason}" for file, reason in skipped.items()), "it is empty")
        raise DataError(f"`{path}` must hold text, but {first}.")
    keys = [key for key, _ in bytes_by_key.most_common() if key != NO_KEY]
    return TextSurvey(path.resolve().name, inputs, tuple(sorted(keys, key=[*PREFERRED_KEYS, *keys].index)), skipped)


def describe_size(path: Path, exclude: Path) -> str:
    """The number and size of the files that `survey` reads, readable or not; opens none."""
    inputs = list[Input]()
    for file in _files(path, exclude)[0]:
        with suppress(DataError):
            inputs += find_inputs(file)
    return f"{pluralize(len(inputs), 'file')}, {pluralize(sum(item.bytes for item in inputs), 'byte')}"


def _files(path: Path, exclude: Path | None) -> tuple[list[Path], list[Path]]:
    """Files of text and of unknown types: `path` itself, or those below it except those below `exclude`."""
    is_folder = path.is_dir() and not is_saved_dataset(path)
    readable, unknown = files_below(path) if is_folder else ([path], [])
    if exclude is not None:
        excluded = exclude.resolve()
        readable, unknown = (
            [file for file in files if not file.parent.resolve().is_relative_to(excluded)]
            for files in (readable, unknown)
        )
    return readable, unknown


def _type_name(item: Input) -> str:
    suffix = next((suffix for suffix in (*CHUNKERS, *ARCHIVES) if item.path.name.endswith(suffix)), None)
    return f"{suffix} file" if suffix else "saved dataset"


NO_KEY = ""
"""The key of texts that are not records."""


@dataclass(frozen=True)
class _CharacterCount(Selection):
    """Counts the characters under each key instead of reading a text."""

    characters: Counter[str] = field(default_factory=Counter)

    def text(self, record: Any) -> None:
        fields = {NO_KEY: record} if isinstance(record, str) else record
        for key, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, str) and not value.isspace():
                self.characters[key] += len(value)

    def columns(self, path: Path | str, names: Sequence[str]) -> list[str]:
        return list(names)


def _characters_by_key(item: Input) -> Counter[str]:
    """Characters under each key in the first chunk of an input. All types but plain JSON lines are read to their
    end, so that a truncated input is a DataError."""
    selection = _CharacterCount()
    for number, chunk in enumerate(item.chunks(selection)):
        if not number:
            parsed = chunk.parse()
            if isinstance(chunk, TextFile):
                selection.characters[NO_KEY] += sum(map(len, parsed.require_texts()))
        if item.path.suffix == ".jsonl":
            break
    return +selection.characters
