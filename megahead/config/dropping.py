"""Token dropping: which tokens of an encoder's rows its middle layers compute."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megahead.config.base import Settings
from megahead.config.model import ModelConfig
from megahead.errors import ConfigError

_LAST = "masking.dropping.to_layer"


class DroppingConfig(Settings):
    """Token dropping (Hou et al. 2022, arXiv 2203.13240): middle layers compute the important tokens of each row alone,
    as many in every row; the others pass by, and are there again behind them. In the first of these layers the
    important tokens still see all. Held-out rows, exports and fine-tuning have nothing of it."""

    from_layer: int = Field(ge=0)
    """First layer that leaves tokens out; the paper has half of the layers less one, 5 of 12 (numbers begin at 0)."""

    to_layer: int | None = Field(default=None, ge=1)
    """First layer behind it that computes all tokens again; the last layer when left out."""

    keep_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of each row's tokens that is kept: mask tokens, then other special ones, then the most important. There is
    room for all mask tokens of a row; with masking.count: bernoulli for as many as are expected, and a row that has
    drawn more loses some."""

    by: Literal["hardest", "frequency", "informative", "weights"] = "hardest"
    """What is important: ids that the model misses more often (`hardest`, as masking.strategy counts them, with
    masking.adapt_every), rare ones, those that say much about their neighbours, or those of large data.id_weights. It
    is drawn which of equally important ones."""

    def layers(self, model: ModelConfig) -> range:
        """The layers that leave tokens out."""
        return range(self.from_layer, model.num_layers - 1 if self.to_layer is None else self.to_layer)

    def check(self, model: ModelConfig, targets: float, late: int, *, splits_rows: bool) -> None:
        """ConfigError unless `model` can drop tokens so. targets: largest share of a row's tokens that may be read as
        mask tokens; late: layers before the one where these enter; `splits_rows`: sequence parallelism does."""
        if splits_rows:
            rule = "be left out with parallel.sequence, which splits whole rows"
            raise ConfigError("masking.dropping", rule, got="given")
        layers = self.layers(model)
        if layers.stop > model.num_layers - 1:
            rule = f"be at most {model.num_layers - 1}, since the last layer computes all tokens"
            raise ConfigError(_LAST, rule, got=layers.stop)
        if not layers:
            rule = f"be below to_layer ({layers.stop})"
            raise ConfigError("masking.dropping.from_layer", rule, got=self.from_layer)
        if self.from_layer < late:
            rule = f"be at least masking.masks_from_layer ({late}), before which there are no mask tokens to be kept"
            raise ConfigError("masking.dropping.from_layer", rule, got=self.from_layer)
        if self.keep_share < targets:
            rule = (
                f"be at least the largest share of targets ({targets:g}), since all may be mask tokens, which are kept"
            )
            raise ConfigError("masking.dropping.keep_share", rule, got=self.keep_share)
