"""The task `next_item`, which ranks all items as the next of held-out sequences; and vectors for nearest neighbours.

U sequences, N items, n items of a block, D features.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from megahead.checkpoints.disk import find_checkpoint
from megahead.data.indexed import Array, IndexedDataset
from megahead.data.item_sequences import END_ID, ItemVocabulary, items_path, read_sequences
from megahead.errors import CheckpointError, DataError, FieldError
from megahead.evaluate.results import Score, TaskResult
from megahead.files import atomic_folder
from megahead.hf.export import ensure_decoder_folder
from megahead.hf.loading import context_length, load_causal, logits_at
from megahead.hf.trained import TrainedModel

CUTOFF = 10
"""k of HR@k, NDCG@k and coverage@k."""

TOLERANCE = 1e-6
"""Scores that differ by at most this share of the lengths of the target and the context are equal: in fp32 even one
product gives equal items slightly different scores."""

_MAX_BLOCK_ITEMS = 1 << 16
_MAX_BATCH_TOKENS = 1 << 14


def next_item(model_dir: Path, file: Path, limit: int | None = None, batch_size: int | None = None) -> TaskResult:
    """Ranks the last item of each document of a dataset among all items, given those before it, by the decoder in
    `model_dir` with its head, in fp32, on a GPU if there is one.

    Scores: HR@10, NDCG@10, MRR with standard errors over sequences, and coverage@10 (the share of items that are among
    the first ten of some sequence); each among all items, and with the suffix `_unseen` among those that are new to the
    sequence (there a repeated item counts as never found). Cost: a forward pass, and U x N products in blocks.
    """
    sequences = read_sequences(file, limit)
    info = IndexedDataset(file.with_suffix("")).info
    if info is None:
        raise DataError(f"`{file.with_suffix('.json')}` must name the number of ids, but is missing.")
    model, num_ids = ItemModel(model_dir), info.vocab_size
    model.require_ids(num_ids)
    ranks = []
    for batch in model.batches(sequences, batch_size):
        contexts_UD = model.contexts([ids[:-1] for ids in batch])
        ranks.append(rank_next_items(model.vectors_ND, contexts_UD, batch, num_ids))
    return TaskResult("next_item", len(sequences), summarize(ranks, num_ids - 1), limit)


class ItemModel:
    """A Hugging Face decoder of items, in fp32, on a GPU if there is one.

    A score is the product of a context (the head's input after a sequence) and an item's vector; if the head has biases
    they are one more feature of items, which is 1 in contexts.
    """

    def __init__(self, folder: Path) -> None:
        """CheckpointError for a folder without a head."""
        self._model = load_causal(folder).to("cuda" if torch.cuda.is_available() else "cpu")
        self._folder, self._head = folder, self._model.get_output_embeddings()
        weight_ND, bias_N = self._head.weight.detach(), self._head.bias
        self.vectors_ND = weight_ND if bias_N is None else torch.cat([weight_ND, bias_N.detach()[:, None]], 1)

    def require_ids(self, count: int) -> None:
        """DataError unless the model has that many ids."""
        num_ids = len(self.vectors_ND)
        if num_ids < count:
            raise DataError(
                f"`{self._folder}` must have the {count:,} ids of the sequences, but has {num_ids:,} "
                "instead; preprocess the sequences with `--items` of the model's training data."
            )

    def batches(self, sequences: Sequence[Array], size: int | None = None) -> Iterator[Sequence[Array]]:
        """Yields `size` sequences at once; None: 16,384 tokens."""
        longest = min(context_length(self._model), max(map(len, sequences), default=1))
        size = size or max(1, _MAX_BATCH_TOKENS // longest)
        for start in range(0, len(sequences), size):
            yield sequences[start : start + size]

    @torch.inference_mode()
    def logits(self, ids: Array) -> Tensor:
        """[N]: the scores of all ids after one sequence, by the whole model."""
        ids_1T = torch.from_numpy(ids[-context_length(self._model) :].astype(np.int64))[None]
        logits_N: Tensor = self._model(input_ids=ids_1T.to(self._model.device)).logits[0, -1]
        return logits_N

    @torch.inference_mode()
    def contexts(self, sequences: Sequence[Array]) -> Tensor:
        """[U, D]: the head's input after each sequence (its most recent items that fit), and 1 beside biases."""
        context = context_length(self._model)
        ids = [torch.from_numpy(ids[-context:].astype(np.int64)) for ids in sequences]
        ids_UT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self._model.device)
        last_U = torch.tensor([len(part) - 1 for part in ids], device=ids_UT.device)
        self._head.forward = lambda hidden: hidden  # its product is computed in blocks of items
        try:
            row_U, inputs = torch.arange(len(ids), device=ids_UT.device), {"input_ids": ids_UT, "use_cache": False}
            contexts_UD = next(logits_at(self._model, row_U, last_U, len(ids), **inputs))
        finally:
            del self._head.forward
        num_ones = self.vectors_ND.shape[1] - contexts_UD.shape[1]
        return torch.nn.functional.pad(contexts_UD.float(), (0, num_ones), value=1.0)


class Ranking:
    """The ranks of U sequences' next items among all items, whose scores are added block by block."""

    def __init__(self, targets_U: Tensor) -> None:
        self.ranks_U = torch.full((len(targets_U),), 0.5, dtype=torch.float64, device=targets_U.device)
        """1 for the best; half a place for each other item of the same score, within TOLERANCE."""

        self._best_scores = torch.empty(len(targets_U), 0, device=targets_U.device)
        self._best_items = torch.empty(len(targets_U), 0, dtype=torch.int64, device=targets_U.device)

    def add(self, scores_Un: Tensor, target_scores_U: Tensor, tolerance_U: Tensor, first: int) -> None:
        """Adds a block whose first id is `first`; the target is one of the items."""
        gaps_Un = scores_Un - target_scores_U[:, None]
        is_better_Un = ~(gaps_Un <= tolerance_U[:, None])  # also NaN, so that a NaN target is last
        self.ranks_U += is_better_Un.sum(1) + (gaps_Un.abs() <= tolerance_U[:, None]).sum(1) / 2
        best = scores_Un.topk(min(CUTOFF, scores_Un.shape[1]))
        scores = torch.cat([self._best_scores, best.values], 1)
        self._best_scores, order = scores.topk(min(CUTOFF, scores.shape[1]))
        self._best_items = torch.cat([self._best_items, best.indices + first], 1).gather(1, order)

    @property
    def top_items(self) -> Tensor:
        """[U, k] int64: ids of the items with the highest scores; the end id where there are fewer."""
        return self._best_items.where(self._best_scores.isfinite(), END_ID)


def rank_next_items(
    vectors_ND: Tensor,
    contexts_UD: Tensor,
    sequences: Sequence[Array],
    num_ids: int,
    block_items: int = _MAX_BLOCK_ITEMS,
) -> tuple[Ranking, Ranking]:
    """Ranks the last item of each sequence: among all ids from 1 to `num_ids` - 1, and among those not in the sequence
    before. Memory: a few times U x block_items scores."""
    device = contexts_UD.device
    targets_U = torch.tensor([int(ids[-1]) for ids in sequences], device=device)
    rows = np.repeat(np.arange(len(sequences)), [len(ids) - 1 for ids in sequences])
    histories = np.concatenate([ids[:-1] for ids in sequences]).astype(np.int64)
    seen_row, seen_id = (torch.from_numpy(part).to(device) for part in (rows, histories))
    every, unseen = Ranking(targets_U), Ranking(targets_U)
    vectors_UD = vectors_ND[targets_U]
    target_scores_U = (contexts_UD * vectors_UD).sum(-1)
    tolerance_U = TOLERANCE * contexts_UD.norm(dim=1) * vectors_UD.norm(dim=1)
    for first in range(END_ID + 1, num_ids, block_items):
        end = min(first + block_items, num_ids)
        scores_Un = contexts_UD @ vectors_ND[first:end].T
        target_rows = ((targets_U >= first) & (targets_U < end)).nonzero()[:, 0]  # equal to themselves by any rounding
        scores_Un[target_rows, targets_U[target_rows] - first] = target_scores_U[target_rows]
        every.add(scores_Un, target_scores_U, tolerance_U, first)
        in_block = (seen_id >= first) & (seen_id < end)
        scores_Un[seen_row[in_block], seen_id[in_block] - first] = -torch.inf
        unseen.add(scores_Un, target_scores_U, tolerance_U, first)
    unseen.ranks_U[seen_row[seen_id == targets_U[seen_row]]] = torch.inf
    return every, unseen


def summarize(rankings: Sequence[tuple[Ranking, Ranking]], num_items: int) -> list[Score]:
    """HR@k, NDCG@k, MRR and coverage@k over all items, then over unseen ones."""
    scores = []
    for suffix, parts in zip(("", "_unseen"), zip(*rankings, strict=True), strict=True):
        ranks_U = torch.cat([part.ranks_U for part in parts])
        is_hit_U = ranks_U <= CUTOFF
        gains = {
            f"hr@{CUTOFF}{suffix}": is_hit_U.double(),
            f"ndcg@{CUTOFF}{suffix}": is_hit_U / (ranks_U + 1).log2(),
            f"mrr{suffix}": 1 / ranks_U,
        }
        scores += [Score.mean(metric, gain_U.cpu()) for metric, gain_U in gains.items()]
        recommended = torch.cat([part.top_items for part in parts]).unique()
        scores.append(Score(f"coverage@{CUTOFF}{suffix}", int((recommended != END_ID).sum()) / num_items, None))
    return scores


# Vectors of items and of sequences, whose products rank items as the model does, for nearest-neighbour indexes.


VECTORS_FILE = "vectors.safetensors"
_COMPARED_SEQUENCES = 16
_LARGEST_ERROR = 1e-4


def write_vectors(
    model: Path, output: Path, sequences: Sequence[Array], vocabulary: ItemVocabulary | None = None
) -> tuple[Sequence[int], Sequence[int], float]:
    """Writes the vectors of all items and the context vectors of `sequences` (ids without the end id, [length] each).
    Returns the shapes of both, and the largest difference of a product and the model's own score, relative to the
    largest score.

    `output` gets `vectors.safetensors` with `items` [N, D] and `contexts` [U, D] in float32, both also as .npy, and
    `keys.json`, the keys of the items in the order of their vectors. The product of a context and an item is the score
    of that item as the next one; if the head has biases they are one more feature, which is 1 in contexts.
    model: a run, checkpoint or Hugging Face folder. vocabulary: None takes `items.json` beside the run's training data.
    Raises CheckpointError if products differ from the model's scores. Memory: all vectors twice.
    """
    vocabulary = vocabulary or _find_vocabulary(model)
    if vocabulary is None:
        hint = "it lies beside the training data"
        raise FieldError("--items", f"name the items.json of `{model}`", got="missing", hint=hint)
    items = ItemModel(ensure_decoder_folder(model))
    items.require_ids(max(len(vocabulary), *(int(ids.max()) + 1 for ids in sequences), 0))
    vectors_ND = items.vectors_ND[: len(vocabulary)].cpu()
    contexts = [items.contexts(batch).cpu() for batch in items.batches(sequences)]
    contexts_UD = torch.cat([torch.empty(0, vectors_ND.shape[1]), *contexts])
    error = _largest_error(items, sequences[:_COMPARED_SEQUENCES], contexts_UD, vectors_ND)
    tensors = {"items": vectors_ND[END_ID + 1 :].contiguous(), "contexts": contexts_UD.contiguous()}
    with atomic_folder(output, replaceable=VECTORS_FILE) as folder:
        save_file(tensors, folder / VECTORS_FILE)
        for name, tensor in tensors.items():
            np.save(folder / f"{name}.npy", tensor.numpy())
        (folder / "keys.json").write_text(json.dumps(vocabulary.keys.to_pylist()), encoding="utf-8")
    return tensors["items"].shape, tensors["contexts"].shape, error


def require_same_items(model: Path, sequences: Path) -> None:
    """DataError if the items of a dataset (its prefix or `.idx`) differ from those of a run's training data and both
    have an items.json: the same id would mean another item, and scores would be meaningless."""
    prefix = str(sequences.with_suffix("") if sequences.suffix == ".idx" else sequences)
    path = items_path(prefix.removesuffix("-test").removesuffix("-validation"))
    trained = _find_vocabulary(model) if path.is_file() else None
    if trained is not None and not ItemVocabulary.load(path).keys.equals(trained.keys):
        raise DataError(
            f"`{path}` must hold the items of the training data of `{model}` in their order, but does not; preprocess "
            "the sequences with `--items` of the training data."
        )


def _find_vocabulary(model: Path) -> ItemVocabulary | None:
    """The vocabulary beside the training data of a run; None without one."""
    if find_checkpoint(model) is None:
        return None
    paths = [items_path(part.prefix) for part in TrainedModel.open(model).config.data.parts()]
    return next((ItemVocabulary.load(path) for path in paths if path.is_file()), None)


def _largest_error(items: ItemModel, sequences: Sequence[Array], contexts_UD: Tensor, vectors_ND: Tensor) -> float:
    """Compares products with the model's own scores; CheckpointError if they differ."""
    if not sequences:
        return 0.0
    scores_UN = contexts_UD[: len(sequences)] @ vectors_ND.T
    expected_UN = torch.stack([items.logits(ids)[: len(vectors_ND)] for ids in sequences]).cpu()
    error = ((scores_UN - expected_UN).abs().max() / expected_UN.abs().max().clamp(min=1)).item()
    if not error <= _LARGEST_ERROR:
        raise CheckpointError(
            f"products of vectors must be the model's scores within {_LARGEST_ERROR}, but differ by {error:.1e}; its "
            "head is no plain product."
        )
    return error
