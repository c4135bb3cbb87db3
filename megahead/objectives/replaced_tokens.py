"""Replaced-token detection (ELECTRA: Clark et al. 2020, arXiv 2003.10555): a generator predicts masked tokens, samples
from it replace them, and the model classifies each token as original or replaced.

B rows, T tokens per row, M = B T, D features, N targets, P classified tokens: all but special tokens and padding; n
targets and U candidates of one `Softmax`.
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
from megahead.models.layers import ACTIVATIONS
from megahead.objectives.auxiliary import Auxiliary, ForwardContext
from megahead.objectives.micro_batch import documents_of


class DetectionBatch(NamedTuple):
    """The prepared tensors of a batch."""

    uniform_N: Tensor
    """float64, in (0, 1): the random number of each target, for sampling its replacement."""

    classified_P: Tensor
    """int64, increasing: indices of the classified tokens among all B * T."""


class DetectionHead(nn.Module):
    """ELECTRA's head (`ElectraDiscriminatorPredictions` of transformers): score(gelu(dense h))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.score = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_PD: Tensor) -> Tensor:
        """[P]: logits of being replaced."""
        logits_P1: Tensor = self.score(self.activation(self.dense(hidden_PD)))
        return logits_P1.squeeze(1)


class ReplacedTokens(Auxiliary):
    """The generator learns the masked tokens; `head` classifies the backbone's outputs as original or replaced."""

    module_name = "detection"
    is_evaluated = True  # on held-out text, too

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        generator, settings = config.generator_config(), config.objective.replaced_tokens
        assert generator is not None
        assert settings is not None
        self.generator = build_backbone(generator)
        del self.generator.embedding  # the backbone looks up its inputs
        self.head = DetectionHead(generator)
        self._samples_all_ids = settings.samples_vocabulary()

    @classmethod
    def prepare(cls, batch: Batch, config: RunConfig, rng: CounterRng) -> DetectionBatch:
        """Masked tokens are classified, too; random numbers depend only on the token's position in its sample."""
        assert config.masking is not None
        index_N = batch.target_index_N
        tokens_M = batch.input_ids_BT.flatten().index_copy(0, index_N, batch.target_ids_N)
        classified_M = ~np.isin(tokens_M.numpy(), config.masking.unmaskable_ids(config.data.end_token))
        uniform_BT = rng.uniform(Purpose.REPLACED_TOKENS, batch.input_ids_BT.shape[1])
        uniform_N = torch.from_numpy(uniform_BT).flatten()[index_N]
        return DetectionBatch(uniform_N, torch.from_numpy(np.flatnonzero(classified_M)))

    @classmethod
    def num_loss_terms(cls, batch: Batch) -> int:
        """The number of classified tokens."""
        return len(batch.auxiliary.classified_P)

    def sums(self, context: ForwardContext) -> Mapping[str, Tensor]:
        """Replaces the targets' embeddings by those of tokens sampled from the generator, encodes them with the
        backbone, and returns the `detection_sums`. A sample equal to the target counts as original."""
        backbone, batch, prepared = context.backbone, context.batch, context.batch.auxiliary
        bias_V = self.training_free_bias_V if context.training else context.head_bias_V
        predictions = context.predictions(bias_V, all_ids=self._samples_all_ids or not context.training)
        sampled_ids_N, sampled_rows_ND = sample_tokens(backbone, predictions, prepared.uniform_N)
        flat = context.inputs_BTD.flatten(0, 1).index_copy(0, batch.target_index_N, sampled_rows_ND)
        hidden_BTD = backbone.encode(flat.view_as(context.inputs_BTD), documents_of(batch))
        replaced_M = batch.input_ids_BT.new_zeros(len(flat), dtype=torch.bool)
        replaced_M[batch.target_index_N] = sampled_ids_N != batch.target_ids_N
        logits_P = self.head(hidden_BTD.flatten(0, 1).index_select(0, prepared.classified_P))
        return detection_sums(logits_P, replaced_M[prepared.classified_P])


def detection_sums(logits_P: Tensor, replaced_P: Tensor) -> dict[str, Tensor]:
    """Binary cross-entropy `loss` of the labels `replaced_P` (bool), and counts, as scalar tensors. For P = 0 the loss
    is a differentiable 0."""
    logits_P = logits_P.to(torch.promote_types(logits_P.dtype, torch.float32))
    loss = F.binary_cross_entropy_with_logits(logits_P, replaced_P.to(logits_P.dtype), reduction="sum")
    predicted_P = logits_P > 0
    count = torch.full((), len(predicted_P), device=predicted_P.device)  # without a copy to the device
    true_positives, true_negatives = (predicted_P & replaced_P).sum(), (~predicted_P & ~replaced_P).sum()
    counts = {"classified": count, "replaced": replaced_P.sum(), "found": true_positives, "kept": true_negatives}
    return {"loss": loss, **counts}


def sample_tokens(backbone: Backbone, predictions: Sequence[Softmax], uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [N]: ids sampled from the predictions of N outputs; [N, D]: their embeddings, differentiable."""
    ids, rows = [], []
    uniform = uniform_N.split([len(prediction.outputs_ND) for prediction in predictions])
    for prediction, uniform_n in zip(predictions, uniform, strict=True):
        index_n, ids_U = prediction.sample(uniform_n), prediction.candidates.ids_U
        ids.append(index_n if ids_U is None else ids_U[index_n])
        # if the output matrix is untied, its rows are not input embeddings
        rows.append(backbone.embed(index_n) if ids_U is None else prediction.gather_rows(index_n))
    return torch.cat(ids), torch.cat(rows)
