"""Packs complete documents into rows (`pack: best_fit`), and keeps the table of these rows on disk.

A document longer than a row is cut into pieces of a full row each, which overlap by one token so that no target is
lost, and a shorter last piece; other documents are one piece. Windows of 65,536 pieces are packed best-fit decreasing:
the longest first, each into the row with the least room that still fits it. The table is made once and stored beside
the dataset as `PREFIX.pack-KEY.rows`; its key is a hash of the documents' lengths and the settings, so that it cannot
belong to other data. Each process writes a file of its own and renames it when complete, so no lock is needed.

    one line of JSON, 256 bytes     starts  R+1 x i64     first tokens  P x i64     lengths  P x i32

R rows, R1 = R + 1, P pieces, B samples of a batch, T targets per row.
Row r is the pieces starts[r] to starts[r + 1], each a span of the dataset's tokens: the index of its first token, and
its length. A sample's *position* is its number within its epoch; the epoch's order maps it to a row of this table.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from megahead.data.indexed import Array, IndexedDataset
from megahead.data.samples import Samples, epoch_orders
from megahead.errors import DataError
from megahead.files import write_atomically

FORMAT = "megahead-rows/1"
HEADER_BYTES = 256
WINDOW = 65_536
PADDING = -1
"""The id in the empty part of a row."""


@dataclass(frozen=True)
class PackTable:
    """The rows of a dataset: row r has the pieces `starts_R1[r]` to `starts_R1[r + 1]`."""

    starts_R1: Array
    first_token_P: Array
    lengths_P: Array

    def __len__(self) -> int:
        return len(self.starts_R1) - 1

    def empty_share(self, row_tokens: int) -> float:
        """The share of the rows that is empty."""
        return 1 - int(self.lengths_P.sum(dtype=np.int64)) / max(len(self) * row_tokens, 1)


class PackedSamples(Samples):
    """Rows of complete documents, shuffled again each epoch; the rest of a row is PADDING."""

    def __init__(self, dataset: IndexedDataset, sequence_length: int, seed: int, table: PackTable) -> None:
        super().__init__(dataset, sequence_length, len(table), min_tokens=2)
        self.table = table
        self._order = epoch_orders(len(table), seed)

    def document_starts(self, sample_indices: Sequence[int] | Array) -> Array:
        """bool [B, T+1]: where the pieces of each row begin, whether or not documents are closed by end tokens."""
        epochs_B, positions_B = np.divmod(np.asarray(sample_indices, np.int64), self.rows_per_epoch)
        document_starts = np.zeros((len(positions_B), self.sequence_length + 1), bool)
        for i, (epoch, position) in enumerate(zip(epochs_B.tolist(), positions_B.tolist(), strict=True)):
            (row,) = self._order(epoch).take(np.array([position]))
            lengths = self.table.lengths_P[self.table.starts_R1[row] : self.table.starts_R1[row + 1]]
            document_starts[i, np.cumsum(lengths) - lengths] = True
        return document_starts

    def _fill(self, rows: Array, index: Array, epoch: int, positions: Array) -> None:
        rows[index] = PADDING
        table = self.table
        for i, row in zip(index.tolist(), self._order(epoch).take(positions).tolist(), strict=True):
            start = 0
            for piece in range(table.starts_R1[row], table.starts_R1[row + 1]):
                length = int(table.lengths_P[piece])
                rows[i, start : start + length] = self.dataset.read(int(table.first_token_P[piece]), length)
                start += length


def pack_table(dataset: IndexedDataset, sequence_length: int, max_documents: int | None = None) -> PackTable:
    """The table for rows of `sequence_length` + 1 tokens, read from disk; made first if it does not exist.

    Making one takes about 2 us per document. Several processes may do it at once, with the same result; ranks of a run
    should let one go first, to save work. DataError if the dataset's index lists no documents, or its folder cannot be
    written.
    """
    if not dataset.num_documents:
        raise DataError(f"`{dataset.prefix}` must list its documents to be packed, but does not; use pack: stream.")
    key = zlib.crc32(repr((FORMAT, WINDOW, sequence_length, max_documents)).encode())
    key = zlib.crc32(dataset.document_index.data, zlib.crc32(dataset.sizes.data, key))
    path = Path(f"{dataset.prefix}.pack-{key:08x}.rows")
    if not path.exists():
        write_atomically(path, *_serialize(best_fit_rows(dataset, sequence_length + 1, max_documents)))
    return read_table(path)


def best_fit_rows(dataset: IndexedDataset, capacity: int, max_documents: int | None) -> PackTable:
    """Packs the whole dataset into rows of at most `capacity` tokens and `max_documents` documents."""
    boundaries = dataset.document_boundaries()
    first_token_P, lengths_P = cut_documents(boundaries[:-1], np.diff(boundaries), capacity)
    starts, pieces = array("q", [0]), array("q")
    for low in range(0, len(first_token_P), WINDOW):
        for row in best_fit(lengths_P[low : low + WINDOW], capacity, max_documents):
            pieces.extend(low + piece for piece in sorted(row))
            starts.append(len(pieces))
    order = np.frombuffer(pieces, np.int64) if pieces else np.empty(0, np.int64)
    return PackTable(np.frombuffer(starts, np.int64), first_token_P[order], lengths_P[order].astype(np.int32))


def cut_documents(first_tokens: Array, sizes: Array, capacity: int) -> tuple[Array, Array]:
    """(index of the first token, length) of the pieces of all documents, in order; empty documents have none."""
    first_tokens, sizes = first_tokens[sizes > 0], sizes[sizes > 0]
    step = capacity - 1
    pieces = np.maximum(-(-(sizes - 1) // step), 1)
    piece_number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = piece_number * step
    return np.repeat(first_tokens, pieces) + offsets, np.minimum(np.repeat(sizes, pieces) - offsets, capacity)


def best_fit(lengths: Array, capacity: int, max_documents: int | None) -> list[list[int]]:
    """Rows, as lists of piece numbers, packed best-fit decreasing.

    `spaces`, an integer with a bit for each amount of space that some row has free, finds the row with the least space.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}
    spaces = 0  # bit s: an open row has space for s tokens
    sizes = lengths.tolist()
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length, space = sizes[piece], capacity
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces ^= 1 << space
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(piece)
        if space > length and len(rows[row]) != max_documents:
            open_rows.setdefault(space - length, []).append(row)
            spaces |= 1 << (space - length)
    return rows


def read_table(path: Path) -> PackTable:
    """Reads and verifies a table; DataError if it is damaged."""
    data = path.read_bytes()
    try:
        header = orjson.loads(data[:HEADER_BYTES])
        rows, pieces = header["rows"], header["pieces"]
        body = memoryview(data)[HEADER_BYTES:]
        is_complete = header["format"] == FORMAT and len(body) == 8 * (rows + 1) + 12 * pieces
        if not is_complete or hashlib.sha256(body).hexdigest() != header["sha256"]:
            raise ValueError("checksum or size differ")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"`{path}` must be a complete table of rows, but is not ({error}); remove it.") from None
    starts_R1 = np.frombuffer(body, "<i8", rows + 1)
    first_token_P = np.frombuffer(body, "<i8", pieces, 8 * (rows + 1))
    return PackTable(starts_R1, first_token_P, np.frombuffer(body, "<i4", pieces, 8 * (rows + 1 + pieces)))


def _serialize(table: PackTable) -> list[bytes]:
    columns = ((table.starts_R1, "<i8"), (table.first_token_P, "<i8"), (table.lengths_P, "<i4"))
    body = [column.astype(dtype).tobytes() for column, dtype in columns]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    header = {"format": FORMAT, "rows": len(table), "pieces": len(table.first_token_P), "sha256": digest.hexdigest()}
    return [orjson.dumps(header).ljust(HEADER_BYTES - 1) + b"\n", *body]
