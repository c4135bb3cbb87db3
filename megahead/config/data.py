"""Which indexed text a run reads, and how rows are cut from it."""

from __future__ import annotations

from pydantic import Field

from megahead.config.base import Settings


class DataConfig(Settings):
    """Indexed token files (`PREFIX.bin` + `PREFIX.idx`) and the rows cut from them."""

    train: str
    """Prefix of the training dataset."""

    validation: str | None = None
    """Prefix of the held-out dataset; no evaluation during training when left out."""

    tokenizer: str | None = None
    """The `tokenizer.json` the text was cut with; copied into the run folder and into exports."""

    sequence_length: int = Field(gt=0)
    """Targets per row (T); a row reads T + 1 tokens."""

    end_token: int = Field(default=0, ge=0)
    """Id that closes each document."""

    isolate_documents: bool = True
    """Documents that share a row never see each other, and positions restart at each."""

    boundary_targets: bool = True
    """Also predict each document's first token, from the end token before it."""

    prefetch: int = Field(default=2, ge=0)
    """Optimizer steps prepared ahead in a background thread; 0 prepares each one when it is needed."""
