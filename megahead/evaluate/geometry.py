"""Geometry of embeddings and outputs, and how close synonyms are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megahead.checkpoints.disk import step_folders
from megahead.checkpoints.reading import open_checkpoint
from megahead.checkpoints.store import step_of
from megahead.data.batch import Batch
from megahead.data.loader import BatchReader, held_out_collator
from megahead.data.samples import EvenlySpacedSamples
from megahead.data.tokenizer import Tokenizer
from megahead.distributed.group import Group
from megahead.errors import DataError, FieldError
from megahead.evaluate.perplexity import open_held_out
from megahead.evaluate.results import ResultCache
from megahead.hf.trained import EMBEDDING, TrainedModel
from megahead.losses.candidates import Candidates, all_rows_as_candidates
from megahead.losses.contrastive import build_objective
from megahead.losses.fused_softmax import build_chunk_softmax
from megahead.losses.scores import Dot
from megahead.objectives.micro_batch import documents_of, target_positions_of, token_subsets_of
from megahead.objectives.pretraining import Pretraining
from megahead.run_folder import RunFolder

# The gradient bottleneck of a head, and the isotropy of outputs and embeddings.
#
# The backbone receives dL/dscores [U] of an output times the candidates' rows [U, D]; what is orthogonal to the D
# columns is lost: the *gradient bottleneck* (Godey and Artzi, arXiv 2603.10145).
# *Anisotropy*: the mean cosine of two different vectors, 0 for uniform directions (Ethayarajh, arXiv 1909.00512).
# *Effective rank*: exp of the entropy of the singular values' shares (Roy and Vetterli 2007), between 1 and D.
#
# N outputs, n of a chunk, U candidates, D features, V vocabulary.

ROWS = 64
"""Default number of held-out rows."""


@dataclass(frozen=True)
class Geometry:
    """Measures of a checkpoint on held-out rows."""

    gradient_share: float
    """Share of the squared norm of dL/dscores in the span of the D columns of the candidates' rows.
    Candidates are those of training: the rows' own targets in a headless run, the vocabulary in a vanilla one."""

    output_rank: float
    output_anisotropy: float
    embedding_rank: float
    embedding_anisotropy: float
    """The same two measures, of all V rows of the input embedding."""


@torch.no_grad()
def measure_geometry(checkpoint: Path, rows: int = ROWS) -> Geometry:
    """Measures the model of a step folder on the run's held-out dataset, in fp32 on the CPU.

    O(N U D) for N outputs: seconds for a small model, minutes for a softmax over 100,000 ids. FieldError if the run
    has no held-out dataset, or a score that is not the dot product.
    """
    model = TrainedModel.open(checkpoint)
    config, pretraining = model.config, model.load()
    if config.objective.score != "dot":
        raise FieldError("objective.score", "be dot for its gradients to be measured", got=config.objective.score)
    samples = EvenlySpacedSamples(open_held_out(config), rows)
    reader = BatchReader(samples, held_out_collator(config))
    per_group = int(model.checkpoint.state.get("group_samples", config.batch.micro_size))
    spread, norms_2 = _VectorStatistics(), torch.zeros(2, dtype=torch.float64)
    for first in range(0, samples.count, per_group):
        batch = reader.read(range(first, min(first + per_group, samples.count)))
        if len(batch.target_ids_N):
            outputs_ND = _outputs(pretraining, batch)
            spread.add(outputs_ND)
            _add_gradient_norms_(norms_2, outputs_ND, *_candidates(model, pretraining, batch), model.temperature())
    table = _VectorStatistics(model.blocks(EMBEDDING, config.model.vocab_size))
    total, projected = norms_2.tolist()
    share = min(projected / total, 1.0) if total else 1.0
    return Geometry(share, spread.rank(), spread.anisotropy(), table.rank(), table.anisotropy())


def add_geometry(folder: RunFolder, report: Callable[[str], None] = print) -> None:
    """Measures each checkpoint of a run that is not in its geometry.json yet, and writes each result at once.
    UserErrors as in `measure_geometry`."""
    results = ResultCache(folder.geometry, "step")
    for path in sorted(step_folders(folder.checkpoints), key=step_of):
        checkpoint = open_checkpoint(path)
        sums = "".join(sorted(entry.sha256 for entry in checkpoint.files.values()))
        key = {"step": checkpoint.step, "weights": hashlib.sha256(sums.encode()).hexdigest()[:16]}
        if results.find(key) is None:
            report(f"measuring {path}")
            progress = {name: checkpoint.state.get(name, 0) for name in ("tokens", "seconds")}
            results.add(key, progress | asdict(measure_geometry(path)), replaces=["step"])


def _outputs(pretraining: Pretraining, batch: Batch) -> Tensor:
    """[N, D]: the head's inputs at positions with targets."""
    inputs_BTD, predictor = pretraining.backbone.embed(batch.input_ids_BT), pretraining.backbones()[-1]
    arguments = documents_of(batch), target_positions_of(batch), token_subsets_of(batch)
    outputs_ND = predictor.encode_at(inputs_BTD, *arguments)
    is_vanilla = pretraining.objective.name == "vanilla"
    return pretraining.mask_head(outputs_ND) if is_vanilla and pretraining.mask_head is not None else outputs_ND


def _candidates(model: TrainedModel, pretraining: Pretraining, batch: Batch) -> tuple[Tensor, Candidates]:
    """[U, D]: the candidates' rows, and the candidates, as in training."""
    objective, size, table = model.config.objective, model.config.model.vocab_size, pretraining.backbone.embedding
    if pretraining.head is not None and (objective.name == "vanilla" or objective.candidates == "own"):
        table = pretraining.head
    table_VD = table.weight[:size]
    if objective.name == "vanilla":
        return table_VD, all_rows_as_candidates(batch.target_ids_N, model.learned_bias(), batch.weight_N)
    candidate_set = build_objective(objective, size, model.dataset_counts()).candidate_set(batch.target_ids_N)
    candidates = candidate_set.candidates(batch.target_ids_N, batch.weight_N)
    return table_VD[candidates.ids_U], candidates


def _add_gradient_norms_(
    norms_2: Tensor, outputs_ND: Tensor, rows_UD: Tensor, candidates: Candidates, temperature: float
) -> None:
    """Adds squared norms of gradients w.r.t. scores, and of their projections on the span of the rows' columns."""
    basis_UD = rows_UD @ _whitening(rows_UD)
    softmax = build_chunk_softmax(outputs_ND, rows_UD, candidates, Dot(temperature), Group())
    weight_N = candidates.apply_weights(torch.ones_like(outputs_ND[:, 0]))
    parts = (each_N.split(softmax.chunk_size) for each_N in (outputs_ND, candidates.target_N, weight_N))
    for outputs_nD, target_n, weight_n in zip(*parts, strict=True):
        _, matrix_nU, weight_n1, _ = softmax.score_gradients(outputs_nD, target_n)
        gradient_nU = (matrix_nU if weight_n1 is None else matrix_nU * weight_n1) * weight_n[:, None]
        for index, each in enumerate((gradient_nU, gradient_nU @ basis_UD)):
            norms_2[index] += each.square().sum(dtype=torch.float64)


def _whitening(rows_UD: Tensor) -> Tensor:
    """[D, rank]: the product of the rows and this matrix has orthonormal columns."""
    values_D, vectors_DD = torch.linalg.eigh(rows_UD.double().T @ rows_UD.double())
    is_nonzero_D = values_D > values_D[-1] * 1e-12
    basis: Tensor = vectors_DD[:, is_nonzero_D] * values_D[is_nonzero_D].rsqrt()
    return basis.to(rows_UD.dtype)


class _VectorStatistics:
    """The effective rank and anisotropy of vectors, by sums over blocks in float64."""

    def __init__(self, blocks: Iterable[Tensor] = ()) -> None:
        self._gram_DD = self._unit_sum_D = torch.zeros(())
        self._vectors = 0
        for block_bD in blocks:
            self.add(block_bD)

    def add(self, vectors_bD: Tensor) -> None:
        vectors_bD = vectors_bD.double()
        self._gram_DD = self._gram_DD + vectors_bD.T @ vectors_bD
        self._unit_sum_D = self._unit_sum_D + F.normalize(vectors_bD).sum(0)
        self._vectors += len(vectors_bD)

    def rank(self) -> float:
        """The effective rank, without centering."""
        values_D = torch.linalg.eigvalsh(self._gram_DD).clamp_min(0).sqrt()
        return float(torch.special.entr(values_D / values_D.sum()).sum().exp())

    def anisotropy(self) -> float:
        """Mean cosine over all pairs of different vectors; O(N D), since the sum over pairs is a squared norm."""
        pairs = self._vectors * (self._vectors - 1)
        return float((self._unit_sum_D.square().sum() - self._vectors) / max(pairs, 1))


# How close WordNet's synonyms are in a model's input embedding, against random pairs of the same words (figure 9
# of Godey et al., arXiv 2309.08351).
#
# A synset line of WordNet's data files: `offset file type count word id word id ... relations | gloss`, `count` in
# hexadecimal (wndb(5WN)). P pairs, V vocabulary, D features.

Pair = tuple[str, str]
_PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")


@dataclass(frozen=True)
class Similarities:
    """Cosines of one model's pairs."""

    synonyms_P: Tensor
    random_P: Tensor

    def gap(self) -> float:
        """How much closer synonyms are than random pairs, on average."""
        return float(self.synonyms_P.mean() - self.random_P.mean())


def synonym_pairs(wordnet: Path) -> list[Pair]:
    """Returns every pair of single words that share a synset in the folder `wordnet` (data.noun and so on), sorted."""
    pairs: set[Pair] = set()
    for part in _PARTS_OF_SPEECH:
        file = wordnet / f"data.{part}"
        if not file.is_file():
            raise DataError(
                f"`{wordnet}` must hold WordNet's data.{part}, but lacks it; install Debian's wordnet-base or "
                "name another folder with --wordnet."
            )
        for words in _synsets(file):
            pairs.update(combinations(sorted(words), 2))
    return sorted(pairs)


def _synsets(file: Path) -> Iterator[set[str]]:
    """Yields the single words of each synset, in lower case, without an adjective's syntactic marker such as `(p)`."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(" "):  # the licence
            continue
        fields = line.split(" ")
        try:
            count = int(fields[3], 16)
            words = [fields[4 + 2 * k].partition("(")[0].lower() for k in range(count)]
        except (IndexError, ValueError):
            raise DataError(f"`{file}` must hold synsets of WordNet, but has the line {line[:40]!r}.") from None
        yield {word for word in words if word.isalpha()}


def similarities(weight_VD: Tensor, tokenizer: Tokenizer, pairs: Sequence[Pair], seed: int = 0) -> Similarities:
    """Returns cosines of pairs of words that are one token each (after a space), and of random pairs: the same with
    their second words shuffled, without pairs of synonyms or of equal words.

    Raises DataError without pairs of either kind.
    """
    words = sorted({word for pair in pairs for word in pair})
    before, *encoded = tokenizer.encode_batch(["a", *(f"a {word}" for word in words)])  # words follow a space
    added = {word: ids[len(before) :] for word, ids in zip(words, encoded, strict=True) if ids[: len(before)] == before}
    ids = {word: tokens[0] for word, tokens in added.items() if len(tokens) == 1}
    synonyms = [(ids[a], ids[b]) for a, b in pairs if a in ids and b in ids and ids[a] != ids[b]]
    if not synonyms:
        raise DataError("the tokenizer must know both words of some pair as one token, but knows none.")
    ids_P2 = torch.tensor(synonyms)
    unit_VD = F.normalize(weight_VD.double(), dim=-1)
    shuffled = np.random.default_rng(seed).permutation(ids_P2[:, 1].numpy())
    excluded = {*synonyms, *((b, a) for a, b in synonyms)}
    others = [(a, b) for a, b in zip(ids_P2[:, 0].tolist(), shuffled.tolist(), strict=True) if a != b]
    others = [pair for pair in others if pair not in excluded]
    if not others:
        raise DataError("the synonyms must be enough to draw other pairs of their words from, but are too few.")
    return Similarities(_cosines(unit_VD, ids_P2), _cosines(unit_VD, torch.tensor(others)))


def _cosines(unit_VD: Tensor, ids_P2: Tensor) -> Tensor:
    return (unit_VD[ids_P2[:, 0]] * unit_VD[ids_P2[:, 1]]).sum(-1)
