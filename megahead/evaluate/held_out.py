"""The held-out text of a trained model, cut as its run cut it."""

from __future__ import annotations

from megahead.config import RunConfig
from megahead.corpus import IndexedDataset
from megahead.data import Samples, held_out_samples
from megahead.data.end_tokens import require_end_tokens
from megahead.errors import FieldError


def open_held_out(config: RunConfig, dataset: str | None = None) -> Samples:
    """Rows of the run's validation dataset, or of `dataset`, a prefix. FieldError where neither is named."""
    prefix = dataset or config.data.validation
    if prefix is None:
        raise FieldError("data.validation", "name a held-out dataset", got="missing", hint="or give one to evaluate on")
    text = IndexedDataset(prefix)
    require_end_tokens(config.data, text)
    return held_out_samples(text, config.sample_length())
