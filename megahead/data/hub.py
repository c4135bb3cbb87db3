"""Streams datasets of the Hugging Face Hub: `hf://datasets/OWNER/NAME[/CONFIG]?split=SPLIT[&revision=REVISION]`.

A split is read as the shards (files) that it has on the Hub, each a part that can be read alone, at one commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from megahead.data.records import ROWS_PER_READ, Chunk, Selection, chunk_batches
from megahead.errors import DataError, FieldError

if TYPE_CHECKING:
    from datasets import IterableDataset  # imported where it is used: it takes a second

PREFIX = "hf://datasets/"
_COMMIT = re.compile("[0-9a-f]{40}")


def is_hub_url(name: str) -> bool:
    """Whether `name` is the URL of a dataset of the Hub."""
    return name.startswith(PREFIX)


@dataclass(frozen=True)
class HubSplit:
    """A split of a dataset, at a revision."""

    name: str
    """OWNER/NAME."""

    split: str
    config: str | None = None
    revision: str | None = None
    """A commit, branch or tag; None for the newest commit."""

    @staticmethod
    def parse(url: str) -> HubSplit:
        """The split that a URL names. FieldError for another form."""
        path, _, query = url.removeprefix(PREFIX).partition("?")
        parts, options = path.strip("/").split("/"), dict(parse_qsl(query, keep_blank_values=True))
        if not 1 <= len(parts) <= 3 or not all(parts) or not options.get("split") or options.keys() - _OPTIONS:
            form = f"{PREFIX}OWNER/NAME[/CONFIG]?split=SPLIT[&revision=REVISION]"
            raise FieldError("--input", f"be {form}", got=url, hint=f"try {PREFIX}{path}?split=train")
        config = parts[2] if len(parts) == 3 else None
        return HubSplit("/".join(parts[:2]), options["split"], config, options.get("revision"))

    @property
    def url(self) -> str:
        """What `parse` reads."""
        path = self.name if self.config is None else f"{self.name}/{self.config}"
        revision = "" if self.revision is None else f"&revision={self.revision}"
        return f"{PREFIX}{path}?split={self.split}{revision}"

    def pin(self) -> HubSplit:
        """The split at the commit that its revision is now. DataError if the Hub does not give it."""
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self
        from huggingface_hub import HfApi

        try:
            return replace(self, revision=HfApi().dataset_info(self.name, revision=self.revision).sha)
        except Exception as error:
            raise self._unreadable(error) from error

    def shards(self) -> list[HubShard]:
        """Its shards, in order. DataError if the Hub does not give it, or has no such config or split."""
        dataset = self.open()
        return [HubShard(self, index, dataset.num_shards) for index in range(dataset.num_shards)]

    def open(self) -> IterableDataset:
        """The stream of its examples; DataError if the Hub does not give it, or has no such config or split."""
        from datasets import load_dataset_builder
        from pyarrow.dataset import ParquetFragmentScanOptions

        try:
            builder = load_dataset_builder(self.name, self.config, revision=self.revision)
            if builder.name == "parquet":  # whose default keeps all that it has read of a file in memory
                options = ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True, buffer_size=8 << 20)
                builder.config.fragment_scan_options, builder.config.batch_size = options, ROWS_PER_READ
            return builder.as_streaming_dataset(split=self.split)
        except Exception as error:  # of the libraries below, each with errors of its own
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> DataError:
        lines = str(error).strip().splitlines()
        reason = (lines[0] if lines else type(error).__name__).rstrip(".:")
        fix = next((fix for words, fix in _FIXES if re.search(words, str(error), re.IGNORECASE)), _OTHER_FIX)
        return DataError(f"`{self.url}` must be a dataset that the Hub gives, but is not ({reason}); {fix}.")


@dataclass(frozen=True)
class HubShard:
    """One of the `count` files of a split."""

    split: HubSplit
    index: int
    count: int

    @property
    def url(self) -> str:
        """Its address in messages and manifests."""
        return f"{self.split.url}#{self.index + 1}-of-{self.count}"

    @property
    def file_name(self) -> str:
        """The name of a dataset made of it."""
        parts = [self.split.name.rpartition("/")[2], self.split.config, self.split.split]
        name = "-".join(re.sub(r"[^\w.-]", "_", part) for part in parts if part)
        return f"{name}-{self.index:05}-of-{self.count:05}"

    def chunk(self, _: Path, selection: Selection) -> Iterator[Chunk]:
        """Its rows, a few at a time; of the columns, those that `selection` needs. DataError if it lacks one of them,
        or the stream ends early."""
        try:
            dataset = self.split.open().shard(self.count, self.index)
            names = dataset.column_names or list(next(iter(dataset), {}))
            dataset = dataset.select_columns(selection.columns(self.url, names)) if names else dataset
            tables = dataset.with_format("arrow").iter(ROWS_PER_READ)
            batches = (batch for table in tables for batch in table.to_batches())
            yield from chunk_batches(self.url, batches, selection, lambda row: 0)
        except DataError:
            raise
        except Exception as error:
            raise self.split._unreadable(error) from error


_OPTIONS = {"split", "revision"}
_OTHER_FIX = "check the name and the network, and call again: it continues"
_FIXES = (
    ("gated", "accept its terms on its page, and log in with `hf auth login`"),
    ("offline", "unset HF_HUB_OFFLINE, or give files"),
    ("config", "name one as OWNER/NAME/CONFIG"),
    ("split", "name one of these as ?split="),
    ("not found|404|doesn't exist|401", "check the name, and for a private one log in with `hf auth login`"),
)
