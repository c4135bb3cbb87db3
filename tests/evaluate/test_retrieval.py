"""Vectors of texts are those of transformers, text by text; ranks are those of numpy and scipy; mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM, BertModel

from megahead.errors import CheckpointError, DataError, FieldError
from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.harness_tasks import read_articles, task_files
from megahead.evaluate.retrieval import TextEncoder, rank_own
from megahead.hf.export import ensure_hf_folder
from megahead.hf.loading import load_tokenizer_folder
from support.small_checkpoint import save_small, save_tokenizer, small_config
from support.small_encoder import save_small_encoder

TEXTS = ["the cat sat", "", "the dog saw " * 40, "the mat", "sat on the mat and saw the dog"]


def ranks_by_hand(products: np.ndarray) -> list[float]:
    ranks = []
    for own, row in enumerate(products):
        gaps = np.delete(row, own) - row[own]
        ranks.append(1 + (gaps > 1e-6).sum() + (abs(gaps) <= 1e-6).sum() / 2)
    return ranks


@pytest.mark.parametrize("block", [3, 20, 100])
def test_ranks_are_those_of_numpy_and_ties_count_half(block: int) -> None:
    queries, vectors = torch.randint(-1, 2, (2, 20, 3), generator=torch.Generator().manual_seed(0)).float()
    ranks = rank_own(queries, vectors, block).tolist()
    assert ranks == ranks_by_hand((queries @ vectors.T).numpy())
    assert any(rank % 1 for rank in ranks)
    vectors[7] = torch.nan  # of a diverged encoder: last, not first
    assert rank_own(queries, vectors, block)[7] > 20


class LargestTensor(TorchDispatchMode):
    """Records the most elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_many_queries_are_ranked_a_block_at_a_time() -> None:
    queries, vectors = torch.randn(2, 700, 3, generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        ranks = rank_own(queries, vectors)
    assert largest.elements == 256 * 700
    assert ranks.tolist() == ranks_by_hand((queries @ vectors.T).numpy())


def test_articles_are_searched_by_title_and_first_sentence(tmp_path: Path) -> None:
    file = tmp_path / "articles.jsonl"
    rows = [
        ("Cats", "Cats\n\nCats sleep. They eat, too. Much."),
        ("猫", "猫は眠る。魚も食べる。"),
        ("Ann", "Anna went home. She slept."),
        ("서울", "서울은 수도다. 크다."),
        ("One sentence", "That is all."),
        ("", "No title. But two sentences."),
    ]
    file.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in rows))
    expected = [
        ("Cats", "Cats sleep.", "They eat, too. Much."),
        ("猫", "は眠る。", "魚も食べる。"),
        ("Ann", "Anna went home.", "She slept."),
        ("서울", "은 수도다.", "크다."),
    ]
    assert [tuple(row.values()) for row in read_articles(file, None)] == expected
    assert len(read_articles(file, 1)) == 1
    with pytest.raises(FieldError, match=r"`--articles` must name the file of task retrieval, but is missing"):
        task_files(["retrieval"])


@pytest.mark.parametrize("model_class", [BertForMaskedLM, BertModel])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_vectors_are_those_of_transformers(tmp_path: Path, model_class: type, batch_size: int | None) -> None:
    """With a head, or with a pooler; in any order, padded or not; a long text is cut and counted."""
    folder = save_small_encoder(tmp_path / "model")
    model_class(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    encoder = TextEncoder(folder, batch_size)
    vectors = encoder.vectors(TEXTS)
    model, tokenizer = BertModel.from_pretrained(folder).eval(), load_tokenizer_folder(folder)
    context = model.config.max_position_embeddings
    for index, text in enumerate(TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: context - 2]
        row = torch.tensor([[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]])
        with torch.no_grad():
            hidden_TD = model(row).last_hidden_state[0]
        for name, expected in (("cls", hidden_TD[0]), ("mean", hidden_TD.mean(0))):
            torch.testing.assert_close(vectors[name][index], F.normalize(expected, dim=0), atol=1e-5, rtol=0)
    assert encoder.num_truncated == 1


def test_texts_are_encoded_as_many_at_once_as_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megahead.evaluate.retrieval._BATCH_TOKENS", 12)
    folder = save_small_encoder(tmp_path / "model")
    BertForMaskedLM(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    rows = [[0] * length for length in (2, 3, 4, 5, 6, 6, 12, 13)]
    by_tokens, by_number = (list(TextEncoder(folder, size)._batches(rows)) for size in (None, 3))
    assert [[*map(len, batch)] for batch in by_tokens] == [[2, 3, 4], [5, 6], [6], [12], [13]]
    assert [len(batch) for batch in by_number] == [3, 3, 2]


def test_both_tasks_score_an_encoder(tmp_path: Path) -> None:
    folder = save_small_encoder(tmp_path / "model")
    BertForMaskedLM(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    titles = ["the cat", "the dog", "the mat", "the cat"]
    articles = tmp_path / "articles.jsonl"
    texts = [f"{title} sat. {title} saw {title} on the mat." for title in titles]
    rows = zip(titles, texts, strict=True)
    articles.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in rows))
    sts = tmp_path / "data/glue/STS-B/dev.tsv"
    sts.parent.mkdir(parents=True)
    pairs = [("the cat sat", "the cat sat", 5.0), ("the cat sat", "the dog", 1.0), ("the mat", "the dog saw", 0.0)]
    lines = ["sentence1\tsentence2\tscore", *("\t".join(map(str, pair)) for pair in pairs)]
    sts.write_text("\n".join(lines) + "\n")
    files = task_files(["retrieval", "stsb"], tmp_path / "data", articles=articles)
    searched, similar = evaluate_tasks(folder, files)
    scores = {score.metric: score.value for score in searched.scores}
    assert len(scores) == 12
    rests = TextEncoder(folder).vectors([row["rest"] for row in read_articles(articles, None)])
    queries = TextEncoder(folder).vectors(titles)
    ranks = np.array(ranks_by_hand((queries["mean"] @ rests["mean"].T).numpy()))
    assert scores["title_mean_recall@1"] == pytest.approx((ranks <= 1).mean())
    assert scores["title_mean_mrr@10"] == pytest.approx((1 / ranks).mean())
    first, second = (TextEncoder(folder).vectors([pair[side] for pair in pairs])["cls"] for side in (0, 1))
    expected = spearmanr([5, 1, 0], (first * second).sum(1)).statistic
    assert similar.scores[0].value == pytest.approx(expected)


def test_what_cannot_be_scored_is_told(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    with pytest.raises(
        CheckpointError, match=r"must hold an encoder, whose \[CLS\] reads the whole text, but does not"
    ):
        TextEncoder(ensure_hf_folder(tmp_path / "run"))
    (tmp_path / "articles.jsonl").write_text('{"title": "a", "text": "One sentence."}\n')
    with pytest.raises(DataError, match="must hold examples, but is empty"):
        task_files(["retrieval"], articles=tmp_path / "articles.jsonl")
