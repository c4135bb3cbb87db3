"""The tokens of sample k: a pure function of (dataset, row length, seed, k), on any number of ranks."""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from functools import lru_cache
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import ArrayLike

from megahead.data.indexed import Array, IndexedDataset
from megahead.errors import DataError
from megahead.files import write_atomically

# A shuffle of [0, n) that is computed, not stored: any item of the order in constant time and memory. A Feistel
# network over the bits of the index is a bijection on [0, 2^bits), whatever its round function; results that are n or
# more pass through it again until they are below n. It uses integer arithmetic and the constants
# below only, so the order depends on (n, seed) alone, on every machine. Changing anything here changes the order of
# every run: another shuffle needs a new class beside this one.

ROUNDS = 8
MIN_BITS = 6  # fewer bits can give too few permutations; for n below 64 there are more passes instead
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
MIX_1 = 0xBF58476D1CE4E5B9  # SplitMix64's factors
MIX_2 = 0x94D049BB133111EB
MASK_64 = (1 << 64) - 1

ORDER_SEED, OFFSET_SEED, DATASET_SEED = 0, 1, 2
"""Last number of a derived seed: for the order of an epoch, for its offset, for one dataset of a blend."""


def derive_seed(*numbers: int) -> int:
    """A 64-bit hash of `numbers` (`scramble`, chained): independent seeds for named purposes."""
    state = 0
    for number in numbers:
        state = int(scramble(np.array([(state + number + GOLDEN) & MASK_64], np.uint64))[0])
    return state


class FeistelOrder:
    """A seeded bijection on [0, n). Costs about 0.1 us an item in bulk."""

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise ValueError(f"an order needs at least one item, but n is {n}")
        self.n, self.seed = n, seed
        bits = max((n - 1).bit_length(), MIN_BITS)
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = np.array([derive_seed(seed, n, round_) for round_ in range(ROUNDS)], np.uint64)

    def take(self, indices: ArrayLike) -> Array:
        """The items at `indices` (each in [0, n)), int64 of the same shape."""
        index_K = np.asarray(indices, np.int64)
        if index_K.size and (index_K.min() < 0 or index_K.max() >= self.n):
            raise IndexError(f"indices must be in [0, {self.n})")
        items = self._permute(index_K.reshape(-1).astype(np.uint64))
        outside = np.flatnonzero(items >= self.n)
        while len(outside):
            items[outside] = self._permute(items[outside])
            outside = outside[items[outside] >= self.n]
        return items.astype(np.int64).reshape(index_K.shape)

    def _permute(self, numbers: Array) -> Array:
        """One pass through the network, a bijection on [0, 2^bits)."""
        low, high = numbers & self._low_mask, numbers >> self._low_bits
        for round_ in range(0, ROUNDS, 2):
            high = high ^ (scramble(low + self._keys[round_]) & self._high_mask)
            low = low ^ (scramble(high + self._keys[round_ + 1]) & self._low_mask)
        return (high << self._low_bits) | low


def scramble(numbers: Array) -> Array:
    """Hashes each of `numbers` (uint64), in place: the last step of the SplitMix64 generator."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(MIX_1)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(MIX_2)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def epoch_orders(items: int, seed: int) -> Callable[[int], FeistelOrder]:
    """A function from an epoch to the order of its items, cached."""
    return lru_cache(maxsize=4)(lambda epoch: FeistelOrder(items, derive_seed(seed, epoch, ORDER_SEED)))


# Sample k is a span of a dataset's tokens. It does not depend on ranks, batches or progress, so a run resumes at
# any sample and on any mesh with the same order. With R rows per epoch, sample k has position k % R in epoch k // R.


SampleIndices = Sequence[int] | Array


class RowSource:
    """Rows of tokens, numbered from 0 without end; each is a pure function of its number."""

    def read(self, sample_indices: SampleIndices) -> tuple[Array, Array | None]:
        """(tokens, int64 [B, T+1], PADDING where a row is empty; bool [B, T+1]: where documents are known to begin, or
        None if only end tokens tell)."""
        raise NotImplementedError


class Samples(RowSource):
    """Rows of `sequence_length` + 1 tokens (T inputs and their T targets), numbered from 0 without end; in file order,
    unless a subclass changes it."""

    def __init__(self, dataset: IndexedDataset, sequence_length: int, rows_per_epoch: int, min_tokens: int) -> None:
        if rows_per_epoch < 1:
            raise DataError(
                f"`{dataset.prefix}` must hold at least {min_tokens:,} tokens for rows of data.sequence_length, but "
                f"holds {dataset.num_tokens:,} instead; add text or shorten data.sequence_length."
            )
        self.dataset, self.sequence_length, self.rows_per_epoch = dataset, sequence_length, rows_per_epoch

    def read(self, sample_indices: SampleIndices) -> tuple[Array, Array]:
        """As `RowSource.read`; index // `rows_per_epoch` is the epoch. O(B T), whatever the dataset."""
        indices_B = np.asarray(sample_indices, np.int64)
        if indices_B.size and indices_B.min() < 0:
            raise IndexError(f"sample indices must not be negative, but one is {indices_B.min()}")
        rows = np.empty((len(indices_B), self.sequence_length + 1), np.int64)
        starts = np.zeros(rows.shape, bool)
        epochs_B, positions_B = np.divmod(indices_B, self.rows_per_epoch)
        for epoch in set(epochs_B.tolist()):
            in_epoch_B = epochs_B == epoch
            rows[in_epoch_B], starts[in_epoch_B] = self._read(epoch, positions_B[in_epoch_B])
        return rows, starts

    def _read(self, epoch: int, positions: Array) -> tuple[Sequence[Array] | Array, Array | bool]:
        """The rows at `positions` of this epoch, and where in them documents are known to begin (False: nowhere)."""
        length = self.sequence_length + 1
        first_tokens = self._first_tokens(epoch, positions).tolist()
        if self.dataset.expects_random_access:
            # the system does not read ahead: request all at once, so that the disk reads them in parallel
            for first in first_tokens:
                self.dataset.prefetch(first, length)
        return [self.dataset.read(first, length) for first in first_tokens], False

    def _first_tokens(self, epoch: int, positions: Array) -> Array:
        """The index in the dataset of the first token of each sample at `positions` of this epoch."""
        return positions * self.sequence_length


class ConcatenatedSamples(Samples):
    """The whole text cut into rows, for training; each epoch is cut at another offset and shuffled anew.

    An epoch has (tokens - T) // T rows: that many fit at any offset in [0, T), and at most 2 T tokens are left out.
    """

    def __init__(self, dataset: IndexedDataset, sequence_length: int, seed: int) -> None:
        rows_per_epoch = (dataset.num_tokens - sequence_length) // sequence_length
        super().__init__(dataset, sequence_length, rows_per_epoch, min_tokens=2 * sequence_length)
        self.seed = seed
        self._order = epoch_orders(rows_per_epoch, seed)

    def offset(self, epoch: int) -> int:
        """Tokens skipped at the start of the text in this epoch, in [0, T)."""
        return derive_seed(self.seed, epoch, OFFSET_SEED) % self.sequence_length

    def _first_tokens(self, epoch: int, positions: Array) -> Array:
        return self.offset(epoch) + self._order(epoch).take(positions) * self.sequence_length


class SequentialSamples(Samples):
    """The whole text cut into rows in file order, for validation: every target at most once an epoch."""

    def __init__(self, dataset: IndexedDataset, sequence_length: int) -> None:
        rows_per_epoch = (dataset.num_tokens - 1) // sequence_length
        super().__init__(dataset, sequence_length, rows_per_epoch, min_tokens=sequence_length + 1)


class StoredSamples(Samples):
    """The dataset's own sequences as rows, as they are and in their own order: Pythia's preshuffled files.

    Every sequence must have T + 1 tokens: rows are never joined, cut or shuffled.
    """

    def __init__(self, dataset: IndexedDataset, sequence_length: int) -> None:
        super().__init__(dataset, sequence_length, len(dataset), min_tokens=sequence_length + 1)
        for i in (0, -1):
            self._read_row(i)

    def _read(self, epoch: int, positions: Array) -> tuple[Sequence[Array], bool]:
        return [self._read_row(position) for position in positions.tolist()], False

    def _read_row(self, i: int) -> Array:
        row, length = self.dataset[i], self.sequence_length + 1
        if len(row) != length:
            raise DataError(
                f"`{self.dataset.prefix}` must have sequences of {length:,} tokens to be read as rows, but sequence "
                f"{i} has {len(row):,}; change data.sequence_length by {len(row) - length:+,}."
            )
        return row


def held_out_samples(dataset: IndexedDataset, sequence_length: int) -> Samples:
    """Rows for evaluation: in file order, and never across the rows of a preshuffled file."""
    samples = SequentialSamples if dataset.num_documents else StoredSamples  # preshuffled files list no documents
    return samples(dataset, sequence_length)


class EvenlySpacedSamples(RowSource):
    """`count` rows of `samples` (or all, if there are fewer), evenly spaced over the text and numbered from 0. Masking
    depends on these numbers: the masked shares of masked diffusion, evenly spaced over consecutive numbers, are so
    over these rows."""

    def __init__(self, samples: Samples, count: int) -> None:
        self._samples, self.count = samples, min(count, samples.rows_per_epoch)

    def read(self, sample_indices: SampleIndices) -> tuple[Array, Array]:
        return self._samples.read(np.asarray(sample_indices, np.int64) * self._samples.rows_per_epoch // self.count)


# Complete documents packed into rows (`pack: best_fit`), and the table of these rows on disk.
#
# A document longer than a row is cut into pieces of a full row each, which overlap by one token so that no target is
# lost, and a shorter last piece; other documents are one piece. Windows of 65,536 pieces are packed best-fit
# decreasing: the longest first, each into the row with the least room that still fits it. The table is made once and
# stored beside the dataset as `PREFIX.pack-KEY.rows`; its key is a hash of the documents' lengths and the settings, so
# that it cannot belong to other data. Each process writes a file of its own and renames it when complete, without lock.
#
#     one line of JSON, 256 bytes     starts  R+1 x i64     first tokens  P x i64     lengths  P x i32
#
# R rows, R1 = R + 1, P pieces, B samples of a batch, T targets per row.
# Row r is the pieces starts[r] to starts[r + 1], each a span of the dataset's tokens: the index of its first token, and
# its length. A sample's *position* is its number within its epoch; the epoch's order maps it to a row of this table.

PACK_FORMAT = "megahead-rows/1"
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

    def _read(self, epoch: int, positions: Array) -> tuple[Array, Array]:
        """Documents begin where pieces do, whether or not they are closed by end tokens."""
        rows, table = np.full((len(positions), self.sequence_length + 1), PADDING, np.int64), self.table
        document_starts = np.zeros(rows.shape, bool)
        for i, row in enumerate(self._order(epoch).take(positions).tolist()):
            start = 0
            for piece in range(table.starts_R1[row], table.starts_R1[row + 1]):
                length = int(table.lengths_P[piece])
                rows[i, start : start + length] = self.dataset.read(int(table.first_token_P[piece]), length)
                document_starts[i, start] = True
                start += length
        return rows, document_starts


def pack_table(dataset: IndexedDataset, sequence_length: int, max_documents: int | None = None) -> PackTable:
    """The table for rows of `sequence_length` + 1 tokens, read from disk; made first if it does not exist.

    Making one takes about 2 us per document. Several processes may do it at once, with the same result; ranks of a run
    should let one go first, to save work. DataError if the dataset's index lists no documents, or its folder cannot be
    written.
    """
    if not dataset.num_documents:
        raise DataError(f"`{dataset.prefix}` must list its documents to be packed, but does not; use pack: stream.")
    key = zlib.crc32(repr((PACK_FORMAT, WINDOW, sequence_length, max_documents)).encode())
    key = zlib.crc32(dataset.document_index.data, zlib.crc32(dataset.sizes.data, key))
    path = Path(f"{dataset.prefix}.pack-{key:08x}.rows")
    if not path.exists():
        table = best_fit_rows(dataset, sequence_length + 1, max_documents)
        columns = ((table.starts_R1, "<i8"), (table.first_token_P, "<i8"), (table.lengths_P, "<i4"))
        body = b"".join(column.astype(dtype).tobytes() for column, dtype in columns)
        sha256, pieces = hashlib.sha256(body).hexdigest(), len(table.first_token_P)
        header = {"format": PACK_FORMAT, "rows": len(table), "pieces": pieces, "sha256": sha256}
        write_atomically(path, orjson.dumps(header).ljust(HEADER_BYTES - 1) + b"\n", body)
    return read_table(path)


def best_fit_rows(dataset: IndexedDataset, capacity: int, max_documents: int | None) -> PackTable:
    """Packs the whole dataset into rows of at most `capacity` tokens and `max_documents` documents."""
    boundaries = dataset.document_boundaries()
    has_tokens, step = np.diff(boundaries) > 0, capacity - 1
    first_tokens, sizes = boundaries[:-1][has_tokens], np.diff(boundaries)[has_tokens]
    num_pieces = np.maximum(-(-(sizes - 1) // step), 1)  # of each document
    piece_number = np.arange(num_pieces.sum()) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    first_token_P = np.repeat(first_tokens, num_pieces) + piece_number * step
    lengths_P = np.minimum(np.repeat(sizes, num_pieces) - piece_number * step, capacity)
    starts, pieces = array("q", [0]), array("q")
    for low in range(0, len(first_token_P), WINDOW):
        for row in best_fit(lengths_P[low : low + WINDOW], capacity, max_documents):
            pieces.extend(low + piece for piece in sorted(row))
            starts.append(len(pieces))
    order = np.frombuffer(pieces, np.int64) if pieces else np.empty(0, np.int64)
    return PackTable(np.frombuffer(starts, np.int64), first_token_P[order], lengths_P[order].astype(np.int32))


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
        is_complete = header["format"] == PACK_FORMAT and len(body) == 8 * (rows + 1) + 12 * pieces
        if not is_complete or hashlib.sha256(body).hexdigest() != header["sha256"]:
            raise ValueError("checksum or size differ")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"`{path}` must be a complete table of rows, but is not ({error}); remove it.") from None
    starts_R1 = np.frombuffer(body, "<i8", rows + 1)
    first_token_P = np.frombuffer(body, "<i8", pieces, 8 * (rows + 1))
    return PackTable(starts_R1, first_token_P, np.frombuffer(body, "<i4", pieces, 8 * (rows + 1 + pieces)))


# Uniform random numbers as a pure function of (seed, sample, purpose, position): SplitMix64 (Steele et al. 2014) of
# counters, for all B samples of a batch at once, W numbers each. It has no state that draws would advance.

_UNUSED_BITS = np.uint64(11)  # of 64 bits; the other 53 are as many as a float64 has


@unique
class Purpose(IntEnum):
    """What random numbers are for. Runs depend on these values: never change one, or reuse one for another purpose."""

    MASKING_ORDER = 1
    MASK_OR_RANDOM = 2
    MASKING_REPLACEMENT = 3
    SPAN_LENGTHS = 17
    MASKED_INPUTS = 33  # of a decoder (MEAP)
    DIFFUSION_SHARES = 41  # the masked share of each row
    DIFFUSION_POSITIONS = 42
    REPLACED_TOKENS = 51
    DROPPING_TIES = 61  # between tokens of one weight, in token dropping
    RETROMAE = 71
    TSDAE = 81


class CounterRng:
    """The random numbers of some samples, independent between samples and between purposes."""

    def __init__(self, seed: int, sample_indices: SampleIndices) -> None:
        self._seed = seed
        self._samples_B = np.asarray(sample_indices, np.uint64)

    def uniform(self, purpose: int, width: int) -> Array:
        """float64 [B, width], each in (0, 1)."""
        key = np.uint64(derive_seed(self._seed, purpose))
        row_B = scramble(self._samples_B * np.uint64(GOLDEN) + key)
        position_W = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return _as_fraction(scramble(row_B[:, None] + position_W))

    def low_discrepancy(self, purpose: int) -> Array:
        """float64 [B], each in (0, 1), evenly spaced over any range of consecutive samples.

        They are multiples of the golden ratio from a random start, modulo 1.
        """
        first = np.uint64(derive_seed(self._seed, purpose))
        return _as_fraction(self._samples_B * np.uint64(GOLDEN) + first)

    def choice(self, purpose: int, allowed_BW: Array, count_B: Array, weight_BW: Array | None = None) -> Array:
        """bool [B, W]: `count_B` of each row's allowed positions (bool), drawn without replacement, in proportion to
        positive weights (as by Gumbel top-k); by default with equal weights."""
        draw_BW = self.uniform(purpose, allowed_BW.shape[1])
        with np.errstate(over="ignore", divide="ignore"):
            sort_key_BW = draw_BW if weight_BW is None else -np.log(draw_BW) / weight_BW
        sort_key_BW = np.minimum(sort_key_BW, np.finfo(np.float64).max)  # below inf, that of positions not allowed
        rank_BW = np.where(allowed_BW, sort_key_BW, np.inf).argsort(axis=1).argsort(axis=1)
        chosen_BW: Array = rank_BW < count_B[:, None]
        return chosen_BW


def _as_fraction(bits: Array) -> Array:
    fraction: Array = ((bits >> _UNUSED_BITS).astype(np.float64) + 0.5) / 2.0**53
    return fraction
