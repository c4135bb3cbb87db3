"""Replaced-token detection: an encoder learns which tokens a small generator has put in place of masked ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megahead.config.base import Settings


class ReplacedTokensConfig(Settings):
    """ELECTRA (Clark et al. 2020, arXiv 2003.10555): a generator learns the masked tokens by the run's objective,
    tokens drawn from it take their places, and the run's model learns of each token whether it is the text's."""

    generator_layers: int = Field(default=1, gt=0)
    """Blocks of the generator, of the model's width and kind (as in COCO-LM, arXiv 2102.08473); it reads the model's
    input embedding."""

    draws: Literal["group", "vocabulary"] = "group"
    """headless: what tokens are drawn from. `group`: the candidates of their group, which costs next to nothing;
    `vocabulary`: all ids, exactly by the training-free head with the dataset's token counts, which costs the product of
    the masked tokens' outputs and the whole embedding."""

    weight: float = Field(default=50.0, gt=0)
    """Weight of the detection's loss, a mean over all tokens but special ones; the generator's has 1."""
