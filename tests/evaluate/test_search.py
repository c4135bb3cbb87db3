"""Scores of a search are those of trec_eval; pairs and BEIR's folders are read as they are, mistakes in a sentence."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from megahead.errors import DataError
from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.harness_tasks import task_files
from megahead.evaluate.retrieval import TextEncoder, find_nearest, ranking_metrics, score_search
from megahead.evaluate.search_data import SearchData, has_queries, read_search_data, read_tuning_data
from support.small_encoder import TEXT, save_small_encoder

QUERIES = [{"_id": f"q{k}", "text": f"the {word}"} for k, word in enumerate(("cat", "dog", "mat", "unjudged"))]
CORPUS = [
    {"_id": "d1", "title": "cat", "text": "sat on the mat"},
    {"_id": "d2", "text": "the dog saw it"},
    {"_id": "d3", "title": "mat", "text": ""},
]
QRELS = ["q0\td1\t2", "q0\td2\t0", "q1\td2\t1", "q1\td3\t1", "q2\td3\t1"]


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_beir(folder: Path, **qrels: Sequence[str]) -> Path:
    (folder / "qrels").mkdir(parents=True)
    write_rows(folder / "queries.jsonl", QUERIES)
    write_rows(folder / "corpus.jsonl", CORPUS)
    for split, lines in qrels.items():
        (folder / f"qrels/{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    return folder


def random_searches(count: int) -> list[tuple[dict[str, float], dict[str, int]]]:
    """Runs of 0 to 150 texts with equal scores, and judgements from -1 to 3, some of texts that were not found."""
    draw = random.Random(0)
    return [
        (
            {f"d{text}": draw.randrange(40) / 8 for text in draw.sample(range(300), draw.randrange(151))},
            {f"d{text}": draw.randrange(-1, 4) for text in draw.sample(range(300), draw.randrange(1, 40))},
        )
        for _ in range(count)
    ]


def test_metrics_are_those_of_trec_eval() -> None:
    trec_eval = pytest.importorskip("pytrec_eval")
    searches = {f"q{index}": search for index, search in enumerate(random_searches(100)) if search[0]}
    measures = {"ndcg_cut.10", "recall.1,10,100", "recip_rank"}
    expected = trec_eval.RelevanceEvaluator({query: judged for query, (_, judged) in searches.items()}, measures)
    results = expected.evaluate({query: run for query, (run, _) in searches.items()})
    for query, search in searches.items():
        metrics, result = ranking_metrics(*search), results[query]
        assert metrics["ndcg@10"] == pytest.approx(result["ndcg_cut_10"], abs=1e-9)
        assert [metrics[f"recall@{k}"] for k in (1, 10, 100)] == pytest.approx(
            [result[f"recall_{k}"] for k in (1, 10, 100)]
        )
        reciprocal = result["recip_rank"]
        assert metrics["mrr@10"] == pytest.approx(reciprocal if reciprocal >= 0.0999 else 0.0)


def test_metrics_are_those_of_their_definitions() -> None:
    found_late = False
    for run, judgements in random_searches(100):
        order = [text for _, text in sorted(((score, text) for text, score in run.items()), reverse=True)]
        answers = {text: score for text, score in judgements.items() if score > 0}
        gain = sum(answers.get(text, 0) / np.log2(rank + 1) for rank, text in enumerate(order[:10], 1))
        best = sum(score / np.log2(k + 2) for k, score in enumerate(sorted(answers.values(), reverse=True)[:10]))
        ranks = [rank for rank, text in enumerate(order, 1) if text in answers]
        metrics = ranking_metrics(run, judgements)
        assert metrics["ndcg@10"] == pytest.approx(gain / best if best else 0)
        assert metrics["mrr@10"] == (1 / ranks[0] if ranks and ranks[0] <= 10 else 0)
        for k in (1, 10, 100):
            found = sum(rank <= k for rank in ranks)
            assert metrics[f"recall@{k}"] == pytest.approx(found / len(answers) if answers else 0)
        found_late |= bool(ranks) and ranks[0] > 10
    assert found_late


@pytest.mark.parametrize("block", [3, 400, 1000])
def test_the_nearest_are_those_of_a_full_sort(block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, vectors = torch.randn(300, 4, generator=generator), torch.randn(700, 4, generator=generator)
    products, indices = find_nearest(queries, vectors, 20, block)
    expected = (queries @ vectors.T).sort(dim=1, descending=True)
    torch.testing.assert_close(products, expected.values[:, :20])
    assert torch.equal(indices, expected.indices[:, :20])
    assert find_nearest(queries, vectors[:5], 20, block)[1].shape == (300, 5)


def test_a_folder_of_beir_is_read_as_it_is(tmp_path: Path) -> None:
    folder = write_beir(tmp_path, test=QRELS, train=QRELS[:2])
    data = read_search_data(folder)
    assert data.queries == {"q0": "the cat", "q1": "the dog", "q2": "the mat"}
    assert data.corpus == {"d1": "cat sat on the mat", "d2": "the dog saw it", "d3": "mat"}
    assert data.judgements == {"q0": {"d1": 2, "d2": 0}, "q1": {"d2": 1, "d3": 1}, "q2": {"d3": 1}}
    assert list(read_search_data(folder, limit=1).judgements) == ["q0"]
    train, evaluation = read_tuning_data(folder)
    assert [(pair.first_text, pair.second_texts) for pair in train] == [
        ("the cat", ("cat sat on the mat", "the dog saw it"))
    ]
    assert evaluation == data


def test_pairs_hold_out_every_tenth_query(tmp_path: Path) -> None:
    rows = [{"query": f"q {k % 20}", "positive": f"p {k}", "negatives": [f"n {k}", f"p {k - 20}"]} for k in range(40)]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    train, evaluation = read_tuning_data(file)
    assert [*evaluation.queries.values()] == ["q 9", "q 19"]
    texts = [("p 9", "n 9", "p -11"), ("p 29", "n 29"), ("p 19", "n 19", "p -1"), ("p 39", "n 39")]
    assert {*evaluation.corpus.values()} == {text for pair in texts for text in pair}
    assert len(train) == 36
    pair = next(pair for pair in train if pair.second_texts[0] == "p 20")
    assert pair.second_texts == ("p 20", "n 0", "p -20", "n 20")  # p 0 answers the same query


def test_no_answer_is_on_both_sides(tmp_path: Path) -> None:
    """Queries that share answers, directly or through others, are held out together or not at all."""
    rng = np.random.default_rng(0)
    rows = [{"query": f"q {rng.integers(300)}", "positive": f"p {rng.integers(900)}"} for _ in range(400)]
    rows += [{"query": f"common {k}", "positive": "yes"} for k in range(200)]
    train, evaluation = read_tuning_data(write_rows(tmp_path / "pairs.jsonl", rows))
    answers = {
        evaluation.corpus[text]
        for scores in evaluation.judgements.values()
        for text, score in scores.items()
        if score > 0
    }
    queries = {*evaluation.queries.values()}
    assert not answers & {pair.second_texts[0] for pair in train}
    assert not queries & {pair.first_text for pair in train}
    assert {row["positive"] for row in rows if row["query"] in queries} == answers
    assert 20 <= len(queries) <= len({row["query"] for row in rows}) // 10
    few = write_rows(tmp_path / "few.jsonl", rows[-30:])
    with pytest.raises(DataError, match="but has 30, or too many with an equal answer"):
        read_tuning_data(few)


def test_the_task_scores_pairs_and_folders_alike(tmp_path: Path) -> None:
    """A short query, an empty text and one that is longer than the context are encoded; the last is counted."""
    model = save_small_encoder(tmp_path / "model")
    BertForMaskedLM(BertConfig.from_pretrained(model)).save_pretrained(model)
    folder = write_beir(tmp_path / "beir", dev=QRELS)
    write_rows(folder / "corpus.jsonl", [*CORPUS, {"_id": "d4", "text": ""}, {"_id": "d5", "text": "the cat " * 60}])
    (result,) = evaluate_tasks(model, task_files(["retrieval"], articles=folder))
    assert (result.samples, result.num_truncated, len(result.scores)) == (3, 1, 10)
    data, encoder = read_search_data(folder), TextEncoder(model)
    queries, texts = (encoder.vectors([*x.values()])["mean"] for x in (data.queries, data.corpus))
    nearest = (queries @ texts.T).argmax(1).tolist()
    own = [data.judgements[f"q{k}"].get(f"d{index + 1}", 0) > 0 for k, index in enumerate(nearest)]
    scores = {score.metric: score.value for score in result.scores}
    assert scores["mean_recall@1"] == pytest.approx(np.mean([own[0], own[1] / 2, own[2]]))
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"query": "cat", "positive": "the cat sat"}] * 2)
    assert has_queries(pairs)
    assert not has_queries(write_rows(tmp_path / "articles.jsonl", [{"title": "query", "text": "how one asks"}]))
    assert next(evaluate_tasks(model, task_files(["retrieval"], articles=pairs))).scores[0].value == 1


def test_texts_and_queries_without_a_vector_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a diverged run, of some texts or of all."""
    data = read_search_data(write_beir(tmp_path / "beir", test=QRELS))
    encoder = TextEncoder(save_small_encoder(tmp_path / "model"))
    vectors = torch.tensor([[math.nan], [1.0], [0.5]])
    query = encoder.tokenize(["the cat"])[0]
    monkeypatch.setattr(
        encoder, "row_vectors", lambda rows: {"cls": torch.ones(3, 1) if [*rows[0]] == query else vectors}
    )
    scores = {score.metric: score.value for score in score_search(encoder, data, ["cls"])}
    assert scores["cls_recall@1"] == pytest.approx((0 + 1 / 2 + 0) / 3)
    assert scores["cls_mrr@10"] == pytest.approx((0 + 1 + 1 / 2) / 3)
    vectors[:] = math.nan
    assert {score.value for score in score_search(encoder, data, ["cls"])} == {0.0}


@pytest.mark.parametrize("batch_size", [3, 7])
def test_texts_of_the_same_tokens_are_ranked_by_id(tmp_path: Path, batch_size: int) -> None:
    """As by trec_eval, the last first, though batches and products round each text's cosine in another way."""
    encoder, draw = TextEncoder(save_small_encoder(tmp_path / "model"), batch_size), random.Random(0)
    texts = {f"q{k}": " ".join(draw.choices(TEXT.split(), k=k)) for k in range(1, 60)}
    corpus = {f"{copy}-{id_}": text.title() for id_, text in texts.items() for copy in "abcdefg"}
    corpus |= {f"h-{id_}": text for id_, text in texts.items()}
    data = SearchData(texts, corpus, {id_: {f"h-{id_}": 1} for id_ in texts})
    scores = {score.metric: score.value for score in score_search(encoder, data)}
    assert (scores["cls_recall@1"], scores["mean_recall@1"]) == (1, 1)


def test_a_query_that_is_in_the_corpus_does_not_find_itself(tmp_path: Path) -> None:
    """As in ArguAna, where an argument is searched by another; a text with a query's id that is judged is an answer."""
    encoder, folder = TextEncoder(save_small_encoder(tmp_path / "model")), write_beir(tmp_path / "beir")
    texts = [{"_id": f"a{k}", "text": f"the {word} sat"} for k, word in enumerate(("cat", "dog", "mat"))]
    write_rows(folder / "queries.jsonl", texts)
    write_rows(folder / "corpus.jsonl", texts)

    def ndcg(*lines: str) -> float:
        (folder / "qrels/test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
        scores = score_search(encoder, read_search_data(folder), ["mean"])
        return next(score.value for score in scores if score.metric == "mean_ndcg@10")

    each_other = [f"a{i}\ta{k}\t1" for i in range(3) for k in range(3) if i != k]
    assert ndcg(*each_other) == 1
    assert ndcg("a0\ta0\t1", "a1\ta1\t1") == 1
    with_self = ndcg("a0\ta0\t0", "a0\ta1\t1", "a0\ta2\t1")
    assert with_self == pytest.approx((1 / np.log2(3) + 1 / np.log2(4)) / (1 + 1 / np.log2(3)))


MISTAKES = {
    "corpus.jsonl` must have each _id once, but repeats d1; rename": ("corpus.jsonl", [*CORPUS, CORPUS[0]]),
    "queries.jsonl` must have a text for each query, but q0 has none": ("queries.jsonl", [{"_id": "q0", "text": " "}]),
    "qrels/test.tsv` must name ids of corpus.jsonl, but line 2 has d1, which is not there": (
        "corpus.jsonl",
        CORPUS[1:],
    ),
    "qrels/test.tsv` must name ids of queries.jsonl, but line 2 has q0": ("queries.jsonl", QUERIES[1:]),
    "must hold JSON objects with a `_id`, but line 1 is not": ("queries.jsonl", [{"text": "the cat"}]),
    "corpus.jsonl` must be readable UTF-8 text, but is not": ("corpus.jsonl", None),
    "must hold judgements, qrels/test.tsv or qrels/dev.tsv or .* but has none": ("qrels/test.tsv", None),
    "qrels/test.tsv` must begin with a header, but begins with a judgement; add": ("qrels/test.tsv", "q0\td1\t1\n"),
    "qrels/test.tsv` must hold an answer, a score above 0, but holds none": (
        "qrels/test.tsv",
        "q\tc\ts\nq0\td1\t0\n\n",
    ),
    "corpus.jsonl` must have texts as title and text, but d1 has not": ("corpus.jsonl", [{"_id": "d1", "text": ["a"]}]),
    "corpus.jsonl` must hold JSON objects with a `_id`, but line 2": (
        "corpus.jsonl",
        '\n{"_id": "d1", "text": "\\ud800"}',
    ),
    "qrels/test.tsv` must hold judgements after its header, but holds none": ("qrels/test.tsv", []),
    "must hold a query's id, a text's and a whole number, between tabs, but line 2": ("qrels/test.tsv", [{}, {}]),
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_mistakes_in_a_folder_are_reported(tmp_path: Path, sentence: str) -> None:
    folder, (name, rows) = write_beir(tmp_path, test=QRELS[:1]), MISTAKES[sentence]
    (folder / name).unlink()
    if isinstance(rows, str):
        (folder / name).write_text(rows)
    elif rows is not None:
        write_rows(folder / name, rows)
    with pytest.raises(DataError, match=sentence):
        task_files(["retrieval"], articles=folder)


@pytest.mark.parametrize(
    "row",
    [
        {"query": "", "positive": "a"},
        {"query": "a", "positive": " "},
        {"query": "a", "positive": "b", "negatives": "c"},
        {"query": "a", "positive": "b", "negatives": [""]},
        {"query": "a", "positive": 3},
    ],
)
def test_a_pair_without_text_is_reported(tmp_path: Path, row: Mapping[str, Any]) -> None:
    file = write_rows(tmp_path / "pairs.jsonl", [{"query": "a", "positive": "b"}, row])
    with pytest.raises(DataError, match=r"must have texts as query and positive, .*, but pair 2 has not; leave it out"):
        task_files(["retrieval"], articles=file)
