"""Where a run gets its first weights from, if not at random."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megahead.config.base import Settings
from megahead.errors import ConfigError


class InitConfig(Settings):
    """Weights to start from, instead of random ones."""

    from_checkpoint: str | None = None
    """A checkpoint of megahead, or a run folder, whose newest checkpoint is taken; or the URL of one."""

    from_hf: str | None = None
    """Instead of a checkpoint, a Hugging Face folder with the safetensors of a model like `model`: its body and
    embedding are taken, and its head if the objective has one."""

    mode: Literal["continue", "table", "finetune", "probe"] = "finetune"
    """`finetune`: train an untied head, started as a copy of the embedding, with the body; `probe`: that head alone,
    the body frozen; `continue`: the weights as they are, a new schedule; `table`: the same, of which only the embedding
    is trained (and what the objective has beside the body), for another vocabulary."""

    @model_validator(mode="after")
    def _one_source(self) -> InitConfig:
        if (self.from_checkpoint is None) == (self.from_hf is None):
            given = "missing" if self.from_hf is None else "given beside it"
            raise ConfigError("from_checkpoint", "be given, or else from_hf", got=given)
        return self

    def copies_embedding(self) -> bool:
        """Whether a head starts as a copy of the embedding, and not as it was."""
        return self.mode in ("finetune", "probe")
