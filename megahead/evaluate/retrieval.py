"""The tasks `retrieval` and `stsb`: how well an encoder's vectors find texts, and rank pairs of sentences by
similarity, without fine-tuning; and a file of vectors.

Q queries, N texts, n texts of a block, k nearest texts, B texts of a batch, T tokens, D features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional as F

from megahead.data.records import Selection
from megahead.data.sources import Input, read_chunks, total_bytes
from megahead.data.writer import NO_PROGRESS, ProgressBar
from megahead.errors import CheckpointError, DataError, FieldError
from megahead.evaluate.harness_tasks import read_articles, read_similarities
from megahead.evaluate.language_models import special_ids
from megahead.evaluate.results import Score, TaskResult
from megahead.evaluate.search_data import SearchData, has_queries, read_search_data
from megahead.files import AtomicFile
from megahead.hf.export import ensure_encoder_folder
from megahead.hf.loading import (
    context_length,
    is_encoder,
    load_embedding_model,
    load_tokenizer_folder,
    read_context_length,
)
from megahead.hf.other_programs import POOLINGS, PoolingName, max_text_tokens, read_pooling

CUTOFF = 10
"""k of recall@k, MRR@k and nDCG@k."""

RECALL_CUTOFFS = (1, CUTOFF, 100)
"""k of recall@k of queries with judged texts."""

TOLERANCE = 1e-6
"""Cosines that differ by at most this are equal: in fp32, padding changes a text's vector slightly."""

MAX_TOKENS = 512
"""Tokens that are read of a text, [CLS] and [SEP] included, where the context has room for more."""

_BATCH_TOKENS = 1 << 14
_BLOCK_TEXTS = 1 << 16
_BLOCK_QUERIES = 1 << 8


def retrieval(model_dir: Path, file: Path, limit: int | None = None, batch_size: int | None = None) -> TaskResult:
    """Searches all articles of `file` for the rest of each one, with its title and with its first sentence as queries:
    exactly, by the cosine of vectors of the encoder in `model_dir`, in fp32, on a GPU if there is one.

    Scores for each kind of query and of vector ([CLS], and the mean over tokens): recall@1, recall@10 and MRR@10 with
    standard errors over queries. Each article as near as the right one adds half a place to the rank.

    A `file` of pairs, or BEIR's folder, has queries of its own: see `score_search`.
    """
    if has_queries(file):
        data, encoder = read_search_data(file, limit=limit), TextEncoder(model_dir, batch_size)
        return TaskResult("retrieval", len(data.queries), score_search(encoder, data), limit, encoder.num_truncated)
    articles, encoder = read_articles(file, limit), TextEncoder(model_dir, batch_size)
    vectors = {field: encoder.vectors([row[field] for row in articles]) for field in ("title", "sentence", "rest")}
    scores = [
        score
        for query in ("title", "sentence")
        for pooling, vectors_ND in vectors["rest"].items()
        for score in _summarize(f"{query}_{pooling}", rank_own(vectors[query][pooling], vectors_ND))
    ]
    return TaskResult("retrieval", len(articles), scores, limit, encoder.num_truncated)


def stsb(model_dir: Path, file: Path, limit: int | None = None, batch_size: int | None = None) -> TaskResult:
    """Spearman's correlation of the cosine of two sentences' vectors and the similarity that people gave them (STS-B:
    Cer et al. 2017, arXiv 1708.00055), for both kinds of vectors."""
    pairs, encoder = read_similarities(file, limit), TextEncoder(model_dir, batch_size)
    first, second = (encoder.vectors([row[field] for row in pairs]) for field in ("sentence1", "sentence2"))
    labels = [row["score"] for row in pairs]
    scores = []
    for pooling, vectors_ND in first.items():
        cosines_N = (vectors_ND * second[pooling]).sum(1)
        scores.append(Score(f"spearman_{pooling}", float(spearmanr(labels, cosines_N.cpu()).statistic), None))
    return TaskResult("stsb", len(pairs), scores, limit, encoder.num_truncated)


class TextEncoder:
    """The vectors of texts by a Hugging Face encoder: its body, in fp32, on a GPU if there is one."""

    def __init__(
        self, folder: Path, batch_size: int | None = None, max_tokens: int = MAX_TOKENS, *, random_weights: bool = False
    ) -> None:
        """`batch_size`: texts at once; None: 16,384 tokens. `max_tokens`: of a text, [CLS] and [SEP] included, where
        the context has room for them. CheckpointError for a folder of another kind of model."""
        if not is_encoder(folder):
            raise CheckpointError(f"`{folder}` must hold an encoder, whose [CLS] reads the whole text, but does not.")
        self.model = load_embedding_model(folder, random_weights=random_weights)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer, self._batch_size = load_tokenizer_folder(folder), batch_size
        self._start, self._end, _ = special_ids(self.tokenizer)
        self.size = int(self.model.config.hidden_size)
        """Features of a vector: D."""

        self.max_tokens = min(context_length(self.model), max_tokens)
        """Of a text, [CLS] and [SEP] included."""

        self.num_truncated = 0
        """Texts so far that were truncated."""

    def vectors(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """[N, D] each, of length 1: `cls`, the hidden state of [CLS], and `mean`, that over all tokens, [CLS] and [SEP]
        included as in sentence-transformers. Texts of similar lengths are encoded together."""
        return self.row_vectors(self.tokenize(texts))

    @torch.inference_mode()
    def row_vectors(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """As `vectors`, of tokenized texts."""
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        hidden: dict[str, list[Tensor]] = {"cls": [], "mean": []}
        for batch in self._batches([rows[index] for index in order]):
            for pooling, vectors_BD in self.pool(batch).items():
                hidden[pooling].append(vectors_BD)
        inverse = torch.tensor(order).argsort().to(self.model.device)
        return {pooling: torch.cat(parts)[inverse] for pooling, parts in hidden.items()}

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text between [CLS] and [SEP], truncated; truncated texts are counted."""
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        self.num_truncated += sum(len(ids) > self.max_tokens - 2 for ids in encoded)
        return [[self._start, *ids[: self.max_tokens - 2], self._end] for ids in encoded]

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """Consecutive rows, of which the last is the longest."""
        start, limit = 0, self._batch_size or _BATCH_TOKENS
        while start < len(rows):
            end = start + 1
            while end < len(rows) and (end + 1 - start) * (1 if self._batch_size else len(rows[end])) <= limit:
                end += 1
            yield rows[start:end]
            start = end

    def pool(self, rows: Sequence[Sequence[int]]) -> Mapping[str, Tensor]:
        """The vectors of B tokenized texts, [B, D] each, at once and with gradients."""
        ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        lengths_B = torch.tensor([len(row) for row in rows])
        is_text_BT = torch.arange(ids_BT.shape[1]) < lengths_B[:, None]
        ids_BT, is_text_BT = (x.to(self.model.device) for x in (ids_BT, is_text_BT))
        hidden_BTD: Tensor = self.model(input_ids=ids_BT, attention_mask=is_text_BT).last_hidden_state
        summed_BD = (hidden_BTD * is_text_BT[..., None]).sum(1)
        vectors = {"cls": hidden_BTD[:, 0], "mean": summed_BD / is_text_BT.sum(1, keepdim=True)}
        return {pooling: F.normalize(vectors_BD, dim=1) for pooling, vectors_BD in vectors.items()}


# Queries with judged texts, scored as by trec_eval.


def score_search(encoder: TextEncoder, data: SearchData, poolings: Sequence[str] = ("cls", "mean")) -> list[Score]:
    """`ranking_metrics` of an exact search for each kind of vectors, as means over queries.

    As in BEIR, a text with the query's id is the query itself (ArguAna, Quora) and left out of its results, unless it
    is judged. Texts of the same tokens are searched as one: in fp32, their cosines would differ slightly.
    """
    texts_by_row: dict[tuple[int, ...], list[str]] = {}
    for text, row in zip(data.corpus, encoder.tokenize([*data.corpus.values()]), strict=True):
        texts_by_row.setdefault(tuple(row), []).append(text)
    query_vectors, text_vectors = encoder.vectors([*data.queries.values()]), encoder.row_vectors([*texts_by_row])
    texts, scores = list(texts_by_row.values()), []
    for pooling in poolings:
        cosines_Qk, nearest_Qk = find_nearest(query_vectors[pooling], text_vectors[pooling], max(RECALL_CUTOFFS) + 1)
        metrics: dict[str, list[float]] = {}
        for query, cosines, nearest in zip(data.queries, cosines_Qk.tolist(), nearest_Qk.tolist(), strict=True):
            results = zip(nearest, cosines, strict=True)
            run = {text: cosine for index, cosine in results if cosine > -math.inf for text in texts[index]}
            judgements = data.judgements[query]
            if query not in judgements:
                run.pop(query, None)
            for metric, value in ranking_metrics(run, judgements).items():
                metrics.setdefault(metric, []).append(value)
        scores += [Score.mean(f"{pooling}_{metric}", values) for metric, values in metrics.items()]
    return scores


def find_nearest(queries_QD: Tensor, vectors_ND: Tensor, k: int, block: int = _BLOCK_TEXTS) -> tuple[Tensor, Tensor]:
    """[Q, k] products and indices of the k vectors with the largest products with each query, the largest first; all N
    if there are fewer; -inf in place of NaN. Exact. Memory: a few times min(Q, 256) x `block` products."""
    if len(queries_QD) > _BLOCK_QUERIES:
        parts = [find_nearest(part_QD, vectors_ND, k, block) for part_QD in queries_QD.split(_BLOCK_QUERIES)]
        products, indices = zip(*parts, strict=True)
        return torch.cat(products), torch.cat(indices)
    best_Qk = queries_QD.new_empty(len(queries_QD), 0)
    index_Qk = torch.empty_like(best_Qk, dtype=torch.int64)
    for first in range(0, len(vectors_ND), block):
        products_Qn = (queries_QD @ vectors_ND[first : first + block].T).nan_to_num(-math.inf)
        products_Qk, nearest_Qk = products_Qn.topk(min(k, products_Qn.shape[1]), dim=1)
        products_Qk, index_Qk = torch.cat([best_Qk, products_Qk], 1), torch.cat([index_Qk, nearest_Qk + first], 1)
        best_Qk, chosen_Qk = products_Qk.topk(min(k, products_Qk.shape[1]), dim=1)
        index_Qk = index_Qk.gather(1, chosen_Qk)
    return best_Qk, index_Qk


def ranking_metrics(run: Mapping[str, float], judgements: Mapping[str, int]) -> dict[str, float]:
    """nDCG@10, recall@1, @10, @100 and MRR@10 of one query, from scores of texts by id, as trec_eval computes them.

    Equal scores are ranked by id, the last first. nDCG: sum_r gain_r / log2(r + 1) over ranks r, relative to the best
    order of all judged texts; an answer's gain is its judgement. A query without answers has 0.
    """
    ranked = sorted(run, key=lambda text: (run[text], text), reverse=True)
    gains = np.array([max(judgements.get(text, 0), 0) for text in ranked], np.float64)
    best_gains = np.array(sorted((score for score in judgements.values() if score > 0), reverse=True), np.float64)
    answers = max(len(best_gains), 1)
    first = next(iter(np.flatnonzero(gains[:CUTOFF])), math.inf)
    return {
        f"ndcg@{CUTOFF}": _discounted_gain(gains) / (_discounted_gain(best_gains) or 1),
        **{f"recall@{k}": float((gains[:k] > 0).sum()) / answers for k in RECALL_CUTOFFS},
        f"mrr@{CUTOFF}": 1 / (1 + float(first)),
    }


def _discounted_gain(gains: NDArray[np.float64]) -> float:
    gains = gains[:CUTOFF]
    return float((gains / np.log2(np.arange(len(gains)) + 2)).sum())


# Articles that are searched by parts of themselves.


def rank_own(queries_QD: Tensor, vectors_QD: Tensor, block: int = _BLOCK_TEXTS) -> Tensor:
    """float64 [Q]: the rank of vector i for query i by their products, among all vectors; 1 for the best, half a place
    for each other vector of an equal product. Memory: a few times min(Q, 256) x `block` products."""
    own_Q = (queries_QD * vectors_QD).sum(1)
    ranks_Q = torch.full((len(queries_QD),), 0.5, dtype=torch.float64, device=queries_QD.device)
    parts = (tensor.split(_BLOCK_QUERIES) for tensor in (queries_QD, own_Q, ranks_Q))
    for (queries_qD, own_q, ranks_q), vectors_nD in product(zip(*parts, strict=True), vectors_QD.split(block)):
        gaps_qn = queries_qD @ vectors_nD.T - own_q[:, None]
        is_better_qn = ~(gaps_qn <= TOLERANCE)  # also NaN, so that a NaN vector is last
        ranks_q += is_better_qn.sum(1) + (gaps_qn.abs() <= TOLERANCE).sum(1) / 2  # a view of `ranks_Q`
    return ranks_Q


def _summarize(prefix: str, ranks_Q: Tensor) -> list[Score]:
    is_found_Q = ranks_Q <= CUTOFF
    gains = {"recall@1": ranks_Q <= 1, f"recall@{CUTOFF}": is_found_Q, f"mrr@{CUTOFF}": is_found_Q / ranks_Q}
    return [Score.mean(f"{prefix}_{metric}", gain_Q.cpu()) for metric, gain_Q in gains.items()]


# Vectors of texts in a file, a row for each, for a search over one's own documents.

_GROUP_TEXTS = 1024
"""Texts that are sorted by length together."""


def write_text_vectors(
    model: Path,
    inputs: Sequence[Input],
    selection: Selection,
    output: Path,
    num_texts: int,
    *,
    pooling: PoolingName | None = None,
    batch_size: int | None = None,
    progress: ProgressBar = NO_PROGRESS,
) -> tuple[TextEncoder, PoolingName]:
    """Writes `output` as .npy: float32 [N, D], the vectors of the texts of `inputs` in their order, of length 1.
    Returns the encoder, which has counted truncated texts, and the pooling.

    model: a Hugging Face folder, or a run or checkpoint, which is exported first. selection: which records of the
    inputs, and which of their keys. num_texts: N, by `count_texts`. pooling: None reads it from a folder of
    sentence-transformers. batch_size: as in `TextEncoder`. A text longer than the model was trained for is truncated.
    CheckpointError for a decoder; an earlier `output` is replaced at the end. Memory: 4 MB of text and the vectors of
    1,024 texts.
    """
    folder = ensure_encoder_folder(model)
    pooling = pooling or read_pooling(folder)
    if pooling is None:
        hint = f"`{folder}` names none"
        raise FieldError("--pooling", f"be {' or '.join(POOLINGS)}", got="missing", hint=hint)
    max_tokens = max_text_tokens(folder, read_context_length(folder) or MAX_TOKENS)
    encoder, file, num_written = TextEncoder(folder, batch_size, max_tokens), AtomicFile(output), 0
    header = {"descr": "<f4", "fortran_order": False, "shape": (num_texts, encoder.size)}
    try:
        np.lib.format.write_array_header_1_0(file, header)
        for texts in _groups(inputs, selection, progress):
            file.write(encoder.vectors(texts)[pooling].cpu().numpy().astype("<f4").tobytes())
            num_written += len(texts)
        if num_written != num_texts:
            raise DataError(f"the input must hold {num_texts:,} texts, as before, but now holds {num_written:,}.")
        file.sync()
        file.publish()
    finally:
        file.discard()
    return encoder, pooling


def count_texts(inputs: Sequence[Input], selection: Selection, progress: ProgressBar) -> int:
    """Returns the number of texts; DataError if there is none, or one is empty or cannot be read."""
    num_texts = sum(len(texts) for texts in _groups(inputs, selection, progress))
    if not num_texts:
        raise DataError(f"`{inputs[0].path}` must hold texts, but holds none.")
    return num_texts


def _groups(inputs: Sequence[Input], selection: Selection, progress: ProgressBar) -> Iterator[list[str]]:
    """Yields consecutive texts, up to 1,024 at once."""
    progress.start(total_bytes(inputs))
    for chunk in read_chunks(inputs, selection):
        parsed = chunk.parse()
        texts = parsed.require_texts()
        if parsed.empty_locations:
            raise DataError(f"`{parsed.empty_locations[0]}` must hold text, but is empty; remove it from the input.")
        for first in range(0, len(texts), _GROUP_TEXTS):
            group = texts[first : first + _GROUP_TEXTS]
            yield group
            progress.advance(chunk.disk_bytes * len(group) // len(texts), sum(len(text.encode()) for text in group))
        if not texts:
            progress.advance(chunk.disk_bytes, 0)
