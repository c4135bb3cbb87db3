"""Text to indexed datasets, and indexed datasets to batches."""

from megahead import lazy_getattr

__getattr__ = lazy_getattr(__name__, {"indexed": ("IndexedDataset",), "writer": ("IndexedDatasetWriter",)})
