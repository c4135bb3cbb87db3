"""What a head lets through, and how evenly outputs and embeddings fill their space.

The loss's gradient by an output's U scores may point anywhere; the backbone receives its product with the candidates'
rows [U, D], so that what is orthogonal to their D columns is lost: the *gradient bottleneck* (Godey and Artzi,
arXiv 2603.10145). *Anisotropy*: the mean cosine of two different vectors, 0 for even directions (Ethayarajh,
arXiv 1909.00512). *Effective rank*: exp of the entropy of the singular values' shares (Roy and Vetterli 2007), between
1 and D.

N outputs, n of a chunk, U candidates, D features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megahead.convert.source import EMBEDDING, TrainedModel
from megahead.data import Batch, BatchReader, EvenlySpread, held_out_masker
from megahead.data.nearest_ids import open_nearest_ids
from megahead.distributed import Group
from megahead.errors import FieldError
from megahead.evaluate.held_out import open_held_out
from megahead.objectives import Candidates, Dot, build_objective, vocabulary_candidates
from megahead.objectives.three_products import row_step
from megahead.pretraining import Pretraining, documents_of, shorter_rows_of, target_positions_of

ROWS = 64
"""How many held-out rows are read by default."""


@dataclass(frozen=True)
class Geometry:
    """Of one checkpoint, on held-out rows."""

    gradient_share: float
    """Share of the squared norm of the loss's gradient by the scores that reaches the outputs through the candidates'
    rows. Candidates are those of training: the rows' own targets in a headless run, the vocabulary in a vanilla one."""

    output_rank: float
    output_anisotropy: float
    embedding_rank: float
    embedding_anisotropy: float
    """Of all V rows of the input embedding, each counted once."""


def measure_geometry(checkpoint: Path, rows: int = ROWS) -> Geometry:
    """Reads the run's held-out text with the model of a step folder, in fp32 on the CPU.

    O(N U D) for N outputs: seconds for a small model, minutes for a softmax over 100,000 ids. FieldError if the run
    names no held-out text, or scores by no dot product.
    """
    model = TrainedModel.open(checkpoint)
    config, pretraining = model.config, model.load()
    if config.objective.score != "dot":
        raise FieldError("objective.score", "be dot for its gradients to be measured", got=config.objective.score)
    samples = EvenlySpread(open_held_out(config), rows)
    reader = BatchReader(samples, config.data, held_out_masker(config))
    per_group = int(model.checkpoint.state.get("group_samples", config.batch.micro_size))
    spread, shares = _Spread(), _Share()
    for first in range(0, samples.count, per_group):
        batch = reader.read(range(first, min(first + per_group, samples.count)))
        if len(batch.target_ids_N):
            outputs_ND = _outputs(pretraining, batch)
            spread.add(outputs_ND)
            shares.add(outputs_ND, *_candidates(model, pretraining, batch), model.temperature())
    table = _Spread.of(_embeddings(model))
    return Geometry(shares.share(), spread.rank(), spread.anisotropy(), table.rank(), table.anisotropy())


@torch.no_grad()
def _outputs(pretraining: Pretraining, batch: Batch) -> Tensor:
    """[N, D]: what the head multiplies, for the outputs that have targets."""
    backbone = pretraining.backbone
    inputs_BTD = backbone.embed(batch.input_ids_BT)
    places = documents_of(batch), target_positions_of(batch), shorter_rows_of(batch)
    outputs_ND = backbone.encode_at(inputs_BTD, *places)
    vanilla = pretraining.objective.name == "vanilla"
    return pretraining.mask_head(outputs_ND) if vanilla and pretraining.mask_head is not None else outputs_ND


@torch.no_grad()
def _candidates(model: TrainedModel, pretraining: Pretraining, batch: Batch) -> tuple[Tensor, Candidates]:
    """[U, D]: the candidates' rows, and the candidates, as in training."""
    config, size = model.config, model.config.model.vocab_size
    table_VD = (pretraining.backbone.embedding if pretraining.head is None else pretraining.head).weight[:size]
    if config.objective.name == "vanilla":
        return table_VD, vocabulary_candidates(batch.target_ids_N, model.learned_bias(), batch.weight_N)
    nearest = config.data.nearest_ids if config.objective.nearest else None
    nearest_VK = None if nearest is None else torch.from_numpy(open_nearest_ids(nearest, size))
    pool = build_objective(config.objective, size, model.dataset_counts(), nearest_VK).pool(batch.target_ids_N)
    candidates = pool.candidates(batch.target_ids_N, batch.weight_N)
    return table_VD[candidates.ids_U], candidates


def _embeddings(model: TrainedModel) -> Iterator[Tensor]:
    """The input embedding's V rows, in blocks."""
    left = model.config.model.vocab_size
    for block_bD in model.blocks(EMBEDDING):
        yield block_bD[:left]
        left = max(left - len(block_bD), 0)


class _Share:
    """Adds up the squared norms of gradients by scores, all of it and what lies in the span of the rows' columns."""

    def __init__(self) -> None:
        self._all = self._reaching = 0.0

    @torch.no_grad()
    def add(self, outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, temperature: float) -> None:
        """The outputs of one candidate group."""
        basis_UD = rows_UD @ _whitening(rows_UD)
        step = row_step(outputs_ND, rows_UD, candidates, Dot(temperature), Group())
        counted_N = candidates.weighed(torch.ones_like(outputs_ND[:, 0]))
        parts = (each_N.split(step.chunk) for each_N in (outputs_ND, candidates.positive_N, counted_N))
        for outputs_nD, positive_n, counted_n in zip(*parts, strict=True):
            _, matrix_nU, weight_n1, _ = step.residuals(outputs_nD, positive_n)
            gradient_nU = (matrix_nU if weight_n1 is None else matrix_nU * weight_n1) * counted_n[:, None]
            self._all += float(gradient_nU.square().sum(dtype=torch.float64))
            self._reaching += float((gradient_nU @ basis_UD).square().sum(dtype=torch.float64))

    def share(self) -> float:
        """1 where all of it comes through, not more by rounding."""
        return min(self._reaching / self._all, 1.0) if self._all else 1.0


def _whitening(rows_UD: Tensor) -> Tensor:
    """[D, rank]: times it, the rows' columns are orthonormal."""
    values_D, vectors_DD = torch.linalg.eigh(rows_UD.double().T @ rows_UD.double())
    there_D = values_D > values_D[-1] * 1e-12
    basis: Tensor = vectors_DD[:, there_D] * values_D[there_D].rsqrt()
    return basis.to(rows_UD.dtype)


class _Spread:
    """Vectors' second moments and directions, added up block by block in float64."""

    def __init__(self) -> None:
        self._gram_DD = self._direction_D = torch.zeros(())
        self._vectors = 0

    @staticmethod
    def of(blocks: Iterable[Tensor]) -> _Spread:
        """All vectors of the blocks [b, D]."""
        spread = _Spread()
        for block_bD in blocks:
            spread.add(block_bD)
        return spread

    @torch.no_grad()
    def add(self, vectors_bD: Tensor) -> None:
        vectors_bD = vectors_bD.double()
        self._gram_DD = self._gram_DD + vectors_bD.T @ vectors_bD
        self._direction_D = self._direction_D + torch.nn.functional.normalize(vectors_bD).sum(0)
        self._vectors += len(vectors_bD)

    def rank(self) -> float:
        """The effective rank, without centering."""
        values_D = torch.linalg.eigvalsh(self._gram_DD).clamp_min(0).sqrt()
        return float(torch.special.entr(values_D / values_D.sum()).sum().exp())

    def anisotropy(self) -> float:
        """Mean cosine over all pairs of different vectors; O(N D), since the sum over pairs is a squared norm."""
        pairs = self._vectors * (self._vectors - 1)
        return float((self._direction_D.square().sum() - self._vectors) / max(pairs, 1))
