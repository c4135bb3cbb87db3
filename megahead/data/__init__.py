"""Text to indexed datasets, and indexed datasets to batches."""

from megahead.lazy import on_first_use

__getattr__ = on_first_use(__name__, {"indexed": ("IndexedDataset",), "writer": ("IndexedDatasetWriter",)})
