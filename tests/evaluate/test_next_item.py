"""Ranks of next items are those of numpy over all scores, and vectors rank as the model does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megahead.data.indexed import dataset_paths
from megahead.data.item_sequences import ItemVocabulary, read_sequences
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import DataError, FieldError
from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.harness_tasks import task_files
from megahead.evaluate.next_item import rank_next_items, require_same_items, summarize, write_vectors
from megahead.hf.export import ensure_hf_folder
from megahead.hf.loading import load_causal
from support.small_checkpoint import save_small, small_config

NUM_IDS = 61


def made_sequences(count: int = 12, longest: int = 40) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(1, NUM_IDS, generator.integers(2, longest)).astype(np.uint16) for _ in range(count)]


def plain_ranks(scores_UN: np.ndarray, sequences: list[np.ndarray], *, unseen: bool) -> list[float]:
    """By sorting out one sequence after the other; column i has the id i."""
    ranks = []
    for scores, (*history, target) in zip(scores_UN, sequences, strict=True):
        others = [id_ for id_ in range(1, NUM_IDS) if id_ != target and not (unseen and id_ in history)]
        better = sum(scores[id_] > scores[target] for id_ in others)
        ties = sum(scores[id_] == scores[target] for id_ in others)
        ranks.append(np.inf if unseen and target in history else 1 + better + ties / 2)
    return ranks


@pytest.mark.parametrize("block_items", [7, 60, 100])
def test_ranks_are_those_of_numpy(block_items: int) -> None:
    sequences = made_sequences()
    generator = torch.Generator().manual_seed(0)
    vectors_ND = torch.randint(-2, 3, (NUM_IDS + 3, 4), generator=generator).float()  # small integers: many ties
    bias_N = torch.randint(-1, 2, (NUM_IDS + 3,), generator=generator).float()
    contexts_UD = torch.randint(-2, 3, (len(sequences), 4), generator=generator).float()
    scores_UN = (contexts_UD @ vectors_ND.T + bias_N).numpy()
    vectors_ND = torch.cat([vectors_ND, bias_N[:, None]], 1)
    contexts_UD = torch.nn.functional.pad(contexts_UD, (0, 1), value=1.0)
    rankings = rank_next_items(vectors_ND, contexts_UD, sequences, NUM_IDS, block_items)
    assert any(np.isinf(plain_ranks(scores_UN, sequences, unseen=True)))
    for ranking, unseen in zip(rankings, (False, True), strict=True):
        assert ranking.ranks_U.tolist() == plain_ranks(scores_UN, sequences, unseen=unseen)
    best = np.sort(scores_UN[:, 1:NUM_IDS], 1)[:, ::-1][:, :10]
    assert np.take_along_axis(scores_UN, rankings[0].top_items.numpy(), 1).tolist() == best.tolist()
    for items, (*history, _) in zip(rankings[1].top_items.tolist(), sequences, strict=True):
        assert not {*items} & {*history}
    vectors_ND[int(sequences[0][-1])] = torch.nan  # of a diverged model: last, not first
    ranking, _ = rank_next_items(vectors_ND, contexts_UD, sequences, NUM_IDS, block_items)
    assert ranking.ranks_U[0] >= NUM_IDS - 1


@pytest.mark.parametrize("block_items", [7, 60, 100])
def test_equal_items_share_their_ranks_whatever_their_block(block_items: int) -> None:
    sequences, generator = made_sequences(), torch.Generator().manual_seed(0)
    vectors_ND = torch.randn(1, 64, generator=generator).repeat(NUM_IDS, 1)
    contexts_UD = torch.randn(len(sequences), 64, generator=generator)
    every, _ = rank_next_items(vectors_ND, contexts_UD, sequences, NUM_IDS, block_items)
    assert every.ranks_U.tolist() == [NUM_IDS / 2] * len(sequences)


def test_metrics_are_those_of_their_formulas() -> None:
    ranks = torch.tensor([1.0, 2.5, 10.0, 10.5, torch.inf], dtype=torch.float64)
    ranking = type("R", (), {"ranks_U": ranks, "top_items": torch.tensor([[1, 2], [2, 0]])})()
    scores = {score.metric: score for score in summarize([(ranking, ranking)], 8)}  # type: ignore[list-item]
    assert scores["hr@10"].value == pytest.approx(3 / 5)
    assert scores["hr@10"].stderr == pytest.approx(np.std([1, 1, 1, 0, 0], ddof=1) / np.sqrt(5))
    assert scores["ndcg@10_unseen"].value == pytest.approx((1 + 1 / np.log2(3.5) + 1 / np.log2(11)) / 5)
    assert scores["mrr"].value == pytest.approx((1 + 1 / 2.5 + 1 / 10 + 1 / 10.5) / 5)
    assert scores["coverage@10"].value == pytest.approx(2 / 8)


def write_dataset(prefix: Path, sequences: list[np.ndarray], vocab_size: int = NUM_IDS) -> Path:
    with IndexedDatasetWriter(prefix, vocab_size=vocab_size, end_token=0) as writer:
        for ids in sequences:
            writer.add_document(np.append(ids, 0))
    return prefix


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_a_model_ranks_as_its_logits_and_its_vectors_as_it(tmp_path: Path, family: str) -> None:
    """GPT-NeoX with a folded bias, Llama with a bias of its own; some sequences are longer than the context."""
    save_small(tmp_path / "run", small_config(model={"family": family, "max_positions": 32}))
    sequences = made_sequences()
    prefix = write_dataset(tmp_path / "sequences", sequences)
    files = task_files(["next_item"], items=prefix)
    folder = ensure_hf_folder(tmp_path / "run")
    (result,) = evaluate_tasks(folder, files, batch_size=5)

    model = load_causal(folder)
    with torch.no_grad():
        logits = [model(torch.from_numpy(ids[:-1][-32:].astype(np.int64))[None]).logits[0, -1] for ids in sequences]
    scores_UN = torch.stack(logits).numpy()
    values = {score.metric: score.value for score in result.scores}
    for unseen in (False, True):
        ranks = np.array(plain_ranks(scores_UN, sequences, unseen=unseen))
        suffix = "_unseen" if unseen else ""
        assert values[f"hr@10{suffix}"] == pytest.approx((ranks <= 10).mean())
        assert values[f"mrr{suffix}"] == pytest.approx((1 / ranks).mean())

    vocabulary = ItemVocabulary.load(write_items(tmp_path / "items.json"))
    write_vectors(tmp_path / "run", tmp_path / "vectors", [ids[:-1] for ids in sequences], vocabulary)
    tensors = load_file(tmp_path / "vectors/vectors.safetensors")
    products_UN = tensors["contexts"] @ tensors["items"].T
    torch.testing.assert_close(products_UN, torch.from_numpy(scores_UN)[:, 1:NUM_IDS], atol=1e-4, rtol=1e-4)
    assert json.loads((tmp_path / "vectors/keys.json").read_text())[4] == "k5"
    assert np.array_equal(np.load(tmp_path / "vectors/items.npy"), tensors["items"].numpy())


def write_items(path: Path) -> Path:
    entries = [{"id": id_, "key": f"k{id_}" if id_ else None, "count": 1} for id_ in range(NUM_IDS)]
    path.write_text(json.dumps(entries))
    return path


def test_mistakes_are_told(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config())
    prefix = write_dataset(tmp_path / "more", made_sequences(3), vocab_size=500)
    with pytest.raises(DataError, match=r"must have the 500 ids of the sequences, but has 61 instead"):
        next(evaluate_tasks(ensure_hf_folder(tmp_path / "run"), task_files(["next_item"], items=prefix)))
    with pytest.raises(FieldError, match=r"`--items` must name the items\.json"):
        write_vectors(tmp_path / "run", tmp_path / "vectors", [])
    with pytest.raises(FieldError, match=r"`--items` must name the file of task next_item, but is missing"):
        task_files(["next_item"])
    with pytest.raises(DataError, match="must exist"):
        task_files(["next_item"], items=tmp_path / "none")
    vocabulary = ItemVocabulary.load(write_items(tmp_path / "items.json"))
    with pytest.raises(DataError, match=r"must have the 71 ids of the sequences, but has 61 instead"):
        write_vectors(tmp_path / "run", tmp_path / "vectors", [np.array([3, 70])], vocabulary)
    single = write_dataset(tmp_path / "single", [np.array([3])])
    with pytest.raises(DataError, match="sequences of two items at least, but document 0 has 1"):
        read_sequences(dataset_paths(single)[1])


def test_sequences_of_other_items_are_refused(tmp_path: Path) -> None:
    """As many items, in another order: only their names tell."""
    save_small(tmp_path / "run", small_config(data={"train": str(tmp_path / "mine")}))
    for name in ("mine", "copied", "other"):
        write_items(tmp_path / f"{name}-items.json")
    other = tmp_path / "other-items.json"
    other.write_text(other.read_text().replace('"k7"', '"new"'))
    for suffix in ("", "-validation", "-test", "-test.idx"):
        require_same_items(tmp_path / "run", tmp_path / f"copied{suffix}")
        require_same_items(tmp_path / "run", tmp_path / f"nowhere{suffix}")
        with pytest.raises(DataError, match=r"other-items.json` must hold the items of the training data of .*run"):
            require_same_items(tmp_path / "run", tmp_path / f"other{suffix}")
