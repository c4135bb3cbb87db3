"""Strategies select what they say: whole words, geometric spans, rare tokens, collocations; by counting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import orjson
import pytest
import sentencepiece
import zstandard

from megahead.config import masking
from megahead.config.loading import config_from_dict
from megahead.config.masking import MaskingConfig
from megahead.data import indexed
from megahead.data.batch import EncoderRowBuilder
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import training_collator
from megahead.data.masking import MaskingCollator
from megahead.data.samples import CounterRng
from megahead.data.strategies import (
    STRATEGIES,
    WEIGHT_FLOOR,
    Frequency,
    Hardest,
    Informative,
    Pmi,
    Spans,
    Uniform,
    Weights,
    WholeWords,
)
from megahead.data.strategy import PairCounts, Strategy, TargetErrorCounts
from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import TRAINERS, save_tokenizer, train_wordpiece
from megahead.data.vocabulary_map import bytes_of_ids
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import ConfigError

CLS, SEP, MASK, VOCABULARY = 1, 2, 3, 500


def chosen(strategy: Strategy, text: np.ndarray, **settings: Any) -> np.ndarray:
    """bool [B, t]: which tokens of the text are targets."""
    config = MaskingConfig(cls_token=CLS, sep_token=SEP, mask_token=MASK, **settings)
    batch = MaskingCollator(EncoderRowBuilder(config, SEP, False), strategy, VOCABULARY, seed=5).batch(
        text, range(len(text))
    )
    selected = np.zeros((len(text), text.shape[1] + 2), bool)
    selected.reshape(-1)[batch.target_index_N.numpy()] = True
    assert not selected[:, 0].any()
    assert not selected[:, -1].any()
    return selected[:, 1:-1]


def built(
    kind: Any, excluded: tuple[int, ...] = (), pairs: PairCounts | None = None, counts: Any = None, **settings: Any
):
    """A strategy that is built from these counts of the training text."""
    text = SimpleNamespace(
        pair_counts=lambda: pairs,
        token_counts=lambda: counts,
        special_ids=lambda: [*excluded],
        config=SimpleNamespace(data=SimpleNamespace(sequence_length=128)),
    )
    return kind.build(MaskingConfig(cls_token=CLS, sep_token=SEP, mask_token=MASK, **settings), text)


def texts(rows: int, length: int = 126, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, VOCABULARY, (rows, length))


def sentencepiece_model(lines: list[str], path: Path, vocab_size: int = 300) -> None:
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            vocab_size=vocab_size,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )


def run_lengths(selected: np.ndarray) -> list[int]:
    edges = np.diff(np.pad(selected, ((0, 0), (1, 1))).astype(int), axis=1)
    _, begins = np.nonzero(edges == 1)
    _, ends = np.nonzero(edges == -1)
    return (ends - begins).tolist()


CONTINUES = np.arange(VOCABULARY) % 3 == 0
SPELLED = [None] * 4 + [b"a" if continues else b" a" for continues in CONTINUES[4:]]


@pytest.mark.parametrize("count", ["fixed", "bernoulli"])
def test_whole_words_are_selected_whole(count: str) -> None:
    text = texts(500)
    selected = chosen(WholeWords.from_bytes(SPELLED, 126), text, count=count)
    inside = CONTINUES[text[:, 1:]]
    assert (selected[:, 1:] == selected[:, :-1])[inside].all()
    assert selected.mean() == pytest.approx(0.15, abs=0.01)
    assert (selected[:, 1:] != selected[:, :-1])[~inside].any()


SENTENCE = "Naïve (un)believers: 3rd café, привет-мир2\n2020年の猫 स्त्री"
WORDS = "Naïve|(|un|)|believers|:|3rd|café|,|привет|-|мир2|2020|年|の|猫|स्त्री"


@pytest.mark.parametrize("kind", [*TRAINERS, "model"])
@pytest.mark.parametrize("other", ["", "## a heading\n#### another\n" * 20, "Ġ ▁ " * 20], ids=["", "##", "Ġ"])
def test_words_are_the_same_of_all_tokenizers(tmp_path: Path, kind: str, other: str) -> None:
    """Runs of letters of one script, with digits and marks; a character each where no spaces are written. (Trained on
    words alone, since no unit is less than a token.)"""
    lines = [*WORDS.split("|")] * 20
    path = tmp_path / f"tokenizer.{'model' if kind == 'model' else 'json'}"
    if kind == "model":
        sentencepiece_model(lines, path)
    else:
        save_tokenizer(TRAINERS[kind]([*lines, other], 330), path)
    (ids,) = load_tokenizer(path).encode_batch([SENTENCE])
    spelled = bytes_of_ids(str(path), VOCABULARY)
    starts = WholeWords.from_bytes(spelled, 40).starts(np.array([ids]), CounterRng(0, [0]))[0]
    units = [b"".join(spelled[id_] or b"?" for id_ in unit) for unit in np.split(ids, np.flatnonzero(starts)[1:])]
    texts = [unit.decode().strip(" \n▁") for unit in units]
    assert [text for text in texts if text] == WORDS.split("|")


SCRIPTS = {
    "Chinese": "研究竟如何發展？他與妄想女友的戀愛。",
    "Japanese": "ラーメンとカレーライスを食べました。",
    "Thai": "การเปลี่ยนแปลงการปกครองเข้าเมืองโดยไม่ได้รับอนุญาต",
    "Telugu": "విశ్వవిద్యాలయములలో ప్రపంచవ్యాప్తంగా ",
    "an address": "https://example.org/withoutanysignatallbutletterstotheend ",
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("count", "length"), [("fixed", 126), ("fixed", 30), ("bernoulli", 126)])
def test_the_rate_is_reached_in_scripts_of_many_bytes_and_no_character_is_cut(
    script: str, count: Literal["fixed", "bernoulli"], length: int
) -> None:
    """Byte by byte, as byte-level BPE spells what it has not seen."""
    spelled = [None] * 4 + [bytes([byte]) for byte in range(256)]
    stream = np.frombuffer(SCRIPTS[script].encode() * 700, np.uint8).astype(np.int64) + 4
    text = stream[: len(stream) // length * length].reshape(-1, length)
    config = MaskingConfig(cls_token=CLS, sep_token=SEP, mask_token=MASK, count=count)
    words = WholeWords.from_bytes(spelled, config.max_unit_length(length + 2))
    selected = chosen(words, text, count=count)
    if length == 126:
        assert selected.mean() == pytest.approx(0.15, abs=0.012)
    assert count == "bernoulli" or (selected.sum(1) > 0).all()
    inside = (text[:, 1:] - 4) & 0xC0 == 0x80
    assert (selected[:, 1:] == selected[:, :-1])[inside].all()


@cache
def text_of_languages(shared_data: Path) -> dict[str, str]:
    samples: dict[str, str] = {}
    with zstandard.open(shared_data / "text/multilingual_19lang.jsonl.zst", "rt", encoding="utf-8") as lines:
        for document in map(orjson.loads, lines):
            samples[document["lang"]] = (samples.get(document["lang"], "") + document["text"])[:30_000]
    assert len(samples) == 19
    return samples


@pytest.mark.parametrize("name", ["20B_tokenizer", "bert-base-multilingual-cased-tokenizer"])
def test_the_rate_is_reached_in_each_language_of_real_text(shared_data: Path, name: str) -> None:
    tokenizer = load_tokenizer(shared_data / f"tokenizers/{name}.json")
    words = WholeWords.from_bytes(bytes_of_ids(str(tokenizer.path), tokenizer.vocab_size), 10)
    samples = text_of_languages(shared_data)
    for language, ids in zip(samples, tokenizer.encode_batch(list(samples.values())), strict=True):
        text = np.array(ids[: len(ids) // 126 * 126]).reshape(-1, 126)
        selected = chosen(words, text)
        assert selected.mean() == pytest.approx(0.1508, abs=0.002), language
        assert selected.any(1).all(), language


def test_the_words_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    """Else masks would depend on micro-batches and ranks. Rows begin and end within characters of four bytes."""
    words, generator = WholeWords.from_bytes([bytes([byte]) for byte in range(256)], 10), np.random.default_rng(0)
    pieces = [bytes([byte]) for byte in "a 1é猫😀я\u0301b".encode()]
    ids = np.array([int.from_bytes(piece) for piece in pieces])
    rows = ids[(generator.integers(0, len(ids), (200, 1)) + np.arange(7)) % len(ids)]
    together = words.starts(rows, CounterRng(0, [0]))
    for row, starts in zip(rows, together, strict=True):
        assert words.starts(row[None], CounterRng(0, [0])).tolist() == [starts.tolist()]


def test_rows_of_nothing_but_the_ends_of_characters_have_units() -> None:
    words = WholeWords.from_bytes([bytes([byte]) for byte in range(256)], 2)
    starts = words.starts(np.full((2, 4), 0x80), CounterRng(0, [0]))
    assert starts.tolist() == [[True, False, False, False]] * 2


def test_a_character_of_more_tokens_than_may_be_masked_together_is_masked_whole() -> None:
    spelled = [None] * 4 + [bytes([byte]) for byte in "é猫".encode()]
    starts = WholeWords.from_bytes(spelled, 1).starts(np.array([[CLS, 4, 5, 6, 7, 8, 5]]), CounterRng(0, [0]))
    assert starts.tolist() == [[True, True, False, True, False, False, False]]


@pytest.mark.parametrize(("count", "length"), [("bernoulli", 126), ("fixed", 3000)])
def test_spans_have_the_papers_lengths(count: str, length: int) -> None:
    """Geometric of what is no longer than the longest. With a fixed number of targets the last spans of a row must
    still fit: rows are long, so that this is little."""
    stop, longest = 0.2, 10
    lengths = run_lengths(chosen(Spans(stop, longest), texts(800_000 // length, length), rate=0.03, count=count))
    shares = np.bincount(lengths, minlength=longest + 1)[1 : longest + 1] / len(lengths)
    expected = stop * (1 - stop) ** np.arange(longest)
    assert shares == pytest.approx(expected / expected.sum(), abs=0.02)
    assert shares @ np.arange(1, longest + 1) == pytest.approx(3.8, abs=0.2)
    assert set(run_lengths(chosen(Spans(1.0, longest), texts(50), rate=0.02, count=count))) <= {1, 2}


def test_rare_tokens_are_selected_in_proportion_to_their_weight() -> None:
    counts = np.where(np.arange(VOCABULARY) < 100, 9999, 99)  # weights 0.01 and 0.1
    text = texts(3000)
    selected = chosen(built(Frequency, counts=counts), text, rate=0.02)
    frequent = text < 100
    ratio = selected[~frequent].mean() / selected[frequent].mean()
    assert ratio == pytest.approx(10, rel=0.15)
    drawn = chosen(built(Frequency, counts=counts), text, rate=0.02, count="bernoulli")
    assert drawn[~frequent].mean() / drawn[frequent].mean() == pytest.approx(10, rel=0.15)
    assert drawn.mean() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("rate", [0.15, 0.4, 0.8])
def test_drawn_targets_are_the_rate_however_much_ids_differ(rate: float) -> None:
    """Text as Zipf has it: the rarest tokens weigh some thousand times as much as the most frequent ones."""
    share = 1 / np.arange(1, VOCABULARY - 3)
    text = np.random.default_rng(0).choice(np.arange(4, VOCABULARY), (2000, 126), p=share / share.sum())
    counts = np.bincount(text.reshape(-1), minlength=VOCABULARY)
    selected = chosen(built(Frequency, counts=counts, frequency_power=1.0), text, rate=rate, count="bernoulli")
    assert selected.mean() == pytest.approx(rate, abs=0.003)
    assert selected[text > 400].mean() > selected[text == 4].mean() + 0.3


def test_drawn_words_are_the_rate_however_much_they_weigh() -> None:
    text, weight_V = texts(2000), np.where(np.arange(VOCABULARY) % 10 == 0, 50.0, 1.0)
    words = WholeWords.from_bytes(SPELLED, 126)
    weighted = _WeighedWords(words.bytes_, words.ends_V, words.max_tokens, weight_V)
    assert chosen(weighted, text, rate=0.4, count="bernoulli").mean() == pytest.approx(0.4, abs=0.005)


@dataclass(frozen=True)
class _WeighedWords(WholeWords):
    """Words as units, in proportion to the mean weight of their tokens."""

    weight_V: np.ndarray

    def weights(self, tokens_BT: np.ndarray) -> np.ndarray:
        return self.weight_V[tokens_BT]


def test_collocations_are_pairs_of_high_pmi() -> None:
    generator = np.random.default_rng(0)
    run = generator.integers(10, 60, 20_000)
    places = np.arange(0, 19_000, 40)
    run[places], run[places + 1] = 5, 6  # always together
    run[places[:5] + 20], run[places[:5] + 21] = 7, 8  # together too, but seldom
    pairs = built(Pmi, pairs=PairCounts.count([run[:9000], run[9000:]], 100), least_pmi=3.0)
    assert pairs.is_collocation(np.array([5, 6, 7, 11]), np.array([6, 5, 8, 12])).tolist() == [
        True,
        False,
        False,
        False,
    ]
    assert len(pairs.codes) == 1


def test_excluded_ids_are_in_no_pair() -> None:
    run = np.tile([5, 6, 9, 11, 12, 13, 14, 15, 16, 17, 18], 100)
    every = built(Pmi, pairs=PairCounts.count([run], 100), least_pmi=1.0, least_count=5)
    some = built(Pmi, (6,), PairCounts.count([run], 100), least_pmi=1.0, least_count=5)
    a, b = np.array([5, 6, 9]), np.array([6, 9, 11])
    assert every.is_collocation(a, b).tolist() == [True, True, True]
    assert some.is_collocation(a, b).tolist() == [False, False, True]


def test_collocations_are_selected_whole_and_never_longer_than_asked() -> None:
    codes = np.sort(np.array([a * VOCABULARY + b for a, b in [(10, 11), (11, 12), (12, 13), (13, 14)]]))
    text = texts(2000) + 0
    text[:, 40:45] = [10, 11, 12, 13, 14]
    selected = chosen(Pmi(codes, VOCABULARY, max_tokens=3), text)
    first, second = selected[:, 40:43], selected[:, 43:45]
    assert (first.all(1) | ~first.any(1)).all()
    assert (second.all(1) | ~second.any(1)).all()
    assert (first[:, 0] != second[:, 0]).any()


def run_config(folder, strategy: str, **data: Any):
    return config_from_dict(
        {
            "name": "small",
            "model": {"family": "bert", "num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": VOCABULARY},
            "data": {"train": str(folder / "text"), "sequence_length": 32, "end_token": SEP, **data},
            "masking": {"cls_token": CLS, "sep_token": SEP, "mask_token": MASK, "strategy": strategy},
            "batch": {"global_size": 4, "micro_size": 4},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 3},
        }
    )


KINDS = {"uniform": Uniform, "whole_word": WholeWords, "span": Spans, "frequency": Frequency, "weights": Weights}
KINDS |= {"informative": Informative, "hardest": Hardest, "pmi": Pmi}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_gets_the_strategy_it_asks_for(tmp_path, strategy: str) -> None:
    tokenizer = train_wordpiece(["the cat sat on the mat"] * 10, 60)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=VOCABULARY) as writer:
        writer.add_document([*texts(1, 2000)[0].tolist(), SEP])
    np.save(tmp_path / "weights.npy", np.ones(VOCABULARY))
    given = {"id_weights": str(tmp_path / "weights.npy")} if strategy == "weights" else {}
    config = run_config(tmp_path, strategy, tokenizer=str(tmp_path / "tokenizer.json"), **given)
    collator = training_collator(config, [IndexedDataset(tmp_path / "text")], TargetErrorCounts(VOCABULARY, 5, 4))
    assert isinstance(collator, MaskingCollator)
    assert type(collator.strategy) is KINDS[strategy]
    batch = collator.batch(texts(4, 30), range(4))
    assert 0 < batch.target_ids_N.numel() <= 4 * batch.max_targets_per_row <= 4 * round(0.15 * 30)


def test_ids_are_selected_by_the_weights_that_a_file_gives(tmp_path: Path) -> None:
    """Also as single precision, and for fewer ids than the model has."""
    weight_V = np.where(np.arange(VOCABULARY - 1) < 250, 1.0, 5.0)
    np.save(tmp_path / "weights.npy", weight_V.astype(np.float32))
    weights = Weights.read(str(tmp_path / "weights.npy"), VOCABULARY)
    assert weights.weight_V.tolist() == [*weight_V.tolist(), 1.0]
    text = texts(4000)
    selected = chosen(weights, text, rate=0.02)
    light, heavy = (selected[kind].mean() for kind in (text < 250, (text >= 250) & (text < VOCABULARY - 1)))
    assert heavy / light == pytest.approx(5, rel=0.1)


def test_the_weights_may_lie_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    np.save(tmp_path / "weights.npy", np.arange(1.0, 5.0))
    assert Weights.read(f"file://{tmp_path}/weights.npy", 4).weight_V.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("held", "rule"),
    [
        (np.ones((4, 2)), r"hold a number for each of at most model.vocab_size \(4\) ids, but is float64 \(4, 2\)"),
        (np.ones(5), r"hold a number for each of at most model.vocab_size \(4\) ids, but is float64 \(5,\)"),
        (np.array(["x"]), "hold a number for each of at most"),
        (np.array([1.0, 2.0, 0.0, 1.0]), "hold numbers above 0, but is 0 for id 2 instead"),
        (np.array([1.0, np.nan]), "hold numbers above 0, but is nan for id 1 instead"),
    ],
    ids=str,
)
def test_files_that_hold_no_weights_are_refused(tmp_path: Path, held: np.ndarray, rule: str) -> None:
    np.save(tmp_path / "weights.npy", held)
    with pytest.raises(ConfigError, match=rf"`data\.id_weights` must {rule}"):
        Weights.read(str(tmp_path / "weights.npy"), 4)
    with pytest.raises(ConfigError, match=r"`data\.id_weights` must name a file of numpy, but is nowhere"):
        Weights.read("nowhere", 4)


def test_every_name_of_the_setting_has_a_strategy() -> None:
    assert set(masking.STRATEGIES) == STRATEGIES.keys()


def test_an_id_informs_as_much_as_its_pmi_with_its_neighbours_is_on_average() -> None:
    """Against the definition written as loops over occurrences."""
    run = np.random.default_rng(0).integers(5, 12, 4000)
    run[::7], run[1::7] = 12, 13  # always neighbours
    pairs, tokens = Counter(pairwise(run.tolist())), Counter(run.tolist())
    total = sum(pairs.values())
    expected = np.full(20, WEIGHT_FLOOR)
    for (a, b), count in pairs.items():
        pmi = log(count / total) - log(tokens[a] / len(run)) - log(tokens[b] / len(run))
        if count >= 30 and 11 not in (a, b):
            expected[a] += count * max(pmi, 0.0) / (2 * tokens[a])
            expected[b] += count * max(pmi, 0.0) / (2 * tokens[b])
    found = built(Informative, (11,), PairCounts.count([run], 20), least_count=30).weight_V
    np.testing.assert_allclose(found, expected)
    assert found[12] > 2 * found[5:11].max()
    assert found[11] == found[0] == WEIGHT_FLOOR


def test_informative_tokens_are_selected_in_proportion_to_their_weight() -> None:
    weights = np.where(np.arange(VOCABULARY) < 100, 0.2, 1.0)
    text = texts(3000)
    selected = chosen(Informative(weights), text, rate=0.02)
    assert selected[text >= 100].mean() / selected[text < 100].mean() == pytest.approx(5, rel=0.15)


@pytest.mark.parametrize("strategy", ["frequency", "informative", "hardest"])
def test_what_weighs_ids_needs_their_counts(tmp_path, strategy: str) -> None:
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=VOCABULARY) as writer:
        writer.add_document([5, 6, SEP])
    (tmp_path / "text.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"masking\.strategy"):
        training_collator(run_config(tmp_path, strategy), [IndexedDataset(tmp_path / "text")])


def test_chunks_of_tokens_end_where_the_dataset_or_its_share_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=50) as writer:
        writer.add_document(list(range(1, 12)))
    dataset = IndexedDataset(tmp_path / "text")
    monkeypatch.setattr(indexed, "BLOCK_TOKENS", 4)
    for most, told in ((100, [4, 4, 3]), (6, [4, 2])):
        chunks = list(dataset.blocks(most))
        assert [len(chunk) for chunk in chunks] == told
        assert np.concatenate(chunks).tolist() == list(range(1, 12))[:most]
