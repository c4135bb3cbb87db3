"""Replaced-token detection (ELECTRA: Clark et al. 2020, arXiv 2003.10555): a generator learns masked tokens, tokens
drawn from it take their places, and the model learns of each token whether it is the text's own.

B rows, T tokens a row, D features, N targets, P tokens that are classified: all but special ones and padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.data.samples import CounterRng, Purpose
from megahead.losses.softmax import Softmax
from megahead.models.backbone import Backbone
from megahead.models.families import build_backbone
from megahead.objectives.auxiliary import Auxiliary, Pass
from megahead.objectives.micro_batch import documents_of


class Prepared(NamedTuple):
    """What it takes to replace the masked tokens and to judge all of them."""

    draw_N: Tensor
    """float64, in (0, 1): the random number of each target, which decides by what it is replaced."""

    classified_P: Tensor
    """int64, increasing: which of the B * T tokens are classified."""


class DetectionHead(nn.Module):
    """ELECTRA's (`ElectraDiscriminatorPredictions` of transformers): score(gelu(dense h))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.score = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_PD: Tensor) -> Tensor:
        """[P]: log-odds of having been replaced."""
        logits_P1: Tensor = self.score(F.gelu(self.dense(hidden_PD), approximate=self.approximate))
        return logits_P1.squeeze(1)


class ReplacedTokens(Auxiliary):
    """The generator learns the masked tokens; `head` finds in the backbone's outputs which ones it has replaced."""

    key = "detection"
    evaluated = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        generator, settings = config.generator_config(), config.objective.replaced_tokens
        assert generator is not None
        assert settings is not None
        self.generator = without_table(build_backbone(generator))
        self.head = DetectionHead(generator)
        self._draws_all_ids = settings.samples_vocabulary()

    @classmethod
    def prepare(cls, batch: Batch, config: RunConfig, rng: CounterRng) -> Prepared:
        """A classified token may be masked or not; what is drawn depends on the token's place in its sample."""
        assert config.masking is not None
        index_N = batch.target_index_N
        tokens_M = batch.input_ids_BT.flatten().index_copy(0, index_N, batch.target_ids_N)
        classified_M = ~np.isin(tokens_M.numpy(), config.masking.unmaskable_ids(config.data.end_token))
        draw_BT = rng.uniform(Purpose.REPLACED_TOKENS, batch.input_ids_BT.shape[1])
        return Prepared(torch.from_numpy(draw_BT).flatten()[index_N], torch.from_numpy(np.flatnonzero(classified_M)))

    @classmethod
    def counted(cls, batch: Batch) -> int:
        """The tokens that are classified."""
        return len(batch.auxiliary.classified_P)

    def sums(self, given: Pass) -> Mapping[str, Tensor]:
        """How well the backbone finds tokens drawn from the generator's predictions of the targets, where they are not
        the targets themselves; see `detection_sums`. Drawn tokens' rows take the places of the targets."""
        backbone, batch, prepared = given.backbone, given.batch, given.batch.auxiliary
        bias_V = self.sampling_bias_V if given.training else given.head_bias_V
        predictions = given.predictions(bias_V, all_ids=self._draws_all_ids or not given.training)
        drawn_ids_N, drawn_rows_ND = drawn_tokens(backbone, predictions, prepared.draw_N)
        flat = given.inputs_BTD.flatten(0, 1).index_copy(0, batch.target_index_N, drawn_rows_ND)
        hidden_BTD = backbone.encode(flat.view_as(given.inputs_BTD), documents_of(batch))
        replaced_M = batch.input_ids_BT.new_zeros(len(flat), dtype=torch.bool)
        replaced_M[batch.target_index_N] = drawn_ids_N != batch.target_ids_N
        logits_P = self.head(hidden_BTD.flatten(0, 1).index_select(0, prepared.classified_P))
        return detection_sums(logits_P, replaced_M[prepared.classified_P])


def detection_sums(logits_P: Tensor, replaced_P: Tensor) -> dict[str, Tensor]:
    """Of tokens that are replaced (bool) with log-odds of `logits_P`; the loss is binary cross-entropy, with a
    gradient. All are scalar tensors; for P = 0 the loss is 0, connected to its inputs."""
    logits_P = logits_P.to(torch.promote_types(logits_P.dtype, torch.float32))
    loss = F.binary_cross_entropy_with_logits(logits_P, replaced_P.to(logits_P.dtype), reduction="sum")
    predicted_P = logits_P > 0
    count = torch.full((), len(predicted_P), device=predicted_P.device)  # by the device itself, without a wait
    found, kept = (predicted_P & replaced_P).sum(), (~predicted_P & ~replaced_P).sum()
    return {"loss": loss, "classified": count, "replaced": replaced_P.sum(), "found": found, "kept": kept}


def drawn_tokens(backbone: Backbone, predictions: Sequence[Softmax], uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [N]: ids drawn from predictions of N outputs; [N, D]: their rows of the embedding, which learn."""
    shares = uniform_N.split([len(prediction.outputs_ND) for prediction in predictions])
    drawn = [_drawn_from(backbone, *each) for each in zip(predictions, shares, strict=True)]
    ids_N, rows_ND = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return ids_N, rows_ND


def _drawn_from(backbone: Backbone, prediction: Softmax, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    place_N, ids_U = prediction.sample(uniform_N), prediction.candidates.ids_U
    if ids_U is None:  # of all ids; an output matrix of its own has not the embedding's rows
        return place_N, backbone.embed(place_N)
    return ids_U[place_N], prediction.gather_rows(place_N)


def without_table(backbone: Backbone) -> Backbone:
    """`backbone`, which reads rows that another one has looked up in its table."""
    del backbone.embedding
    return backbone
