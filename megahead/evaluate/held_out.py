"""The held-out text of a trained model, cut as its run cut it."""

from __future__ import annotations

from megahead.config import RunConfig
from megahead.corpus import IndexedDataset
from megahead.data import Samples, held_out_samples
from megahead.data.end_tokens import require_end_tokens
from megahead.errors import FieldError


def open_held_out(config: RunConfig, dataset: str | None = None, mark: str | None = None) -> Samples:
    """Rows of the run's validation dataset, or of `dataset`, a prefix. FieldError where neither is named, or where it
    is known to be cut by another tokenizer than that with the `mark` (`TrainedModel.tokenizer_mark`)."""
    prefix = dataset or config.data.validation
    if prefix is None:
        raise FieldError("data.validation", "name a held-out dataset", got="missing", hint="or give one to evaluate on")
    text = IndexedDataset(prefix)
    cut_by = text.cut_by()
    if cut_by is not None and mark is not None and mark not in (cut_by.sha256, f"vocabulary {cut_by.vocabulary}"):
        rule = "be cut by the tokenizer that the model was trained with"
        raise FieldError("dataset", rule, got=f"{prefix}, cut by {cut_by}")
    require_end_tokens(config.data, text)
    return held_out_samples(text, config.sample_length())
