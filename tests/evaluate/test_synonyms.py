"""WordNet's own file format, and cosines against a count by hand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity

from megahead.data.tokenizer import load_tokenizer
from megahead.data.vocabulary_map import ByteVocabulary
from megahead.errors import CheckpointError, DataError
from megahead.evaluate.geometry import similarities, synonym_pairs
from megahead.hf.export import export
from megahead.hf.importing import load_input_embedding
from support.sentencepiece_models import KINDS, sentencepiece_model
from support.small_checkpoint import save_small, save_tokenizer, small_config
from support.vocabularies import TEXT

TOOL = Path(__file__).resolve().parents[2] / "tools" / "synonyms.py"
NOUNS = """  1 This software and database is being provided to you, the LICENSEE.
00001740 03 n 03 cat 0 mat 0 big_cat 1 001 ~ 00002137 n 0000 | an animal; "the cat sat"
00002137 03 n 0a a 0 b 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 J 0 000 | ten of them, counted in hexadecimal
"""
VERBS = "00003000 30 v 02 saw 0 sat 1 000 01 + 02 00 | seen\n00004000 30 v 01 the 0 000 00 | alone\n"
ADJECTIVES = "00005000 00 s 02 dog(p) 0 cat 0 000 | said of some\n"


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    folder = tmp_path / "wordnet"
    folder.mkdir()
    for part, text in (("noun", NOUNS), ("verb", VERBS), ("adj", ADJECTIVES), ("adv", "")):
        (folder / f"data.{part}").write_text(text)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    return tmp_path / "run"


def test_single_words_of_one_synset_are_synonyms(wordnet: Path) -> None:
    pairs = synonym_pairs(wordnet)
    assert {("cat", "mat"), ("sat", "saw"), ("cat", "dog"), ("i", "j")} <= set(pairs)
    assert len(pairs) == 3 + 10 * 9 // 2


def test_cosines_are_those_of_words_that_are_one_token(wordnet: Path, run: Path) -> None:
    weight_VD, vocabulary = load_input_embedding(run)
    tokenizer = load_tokenizer(vocabulary)
    pairs = [("cat", "mat"), ("sat", "saw"), ("cat", "dog"), ("cat", "elephant")]
    found = similarities(weight_VD, tokenizer, pairs)

    def row(word: str) -> torch.Tensor:
        (only,) = tokenizer.encode_batch([f" {word}"])[0]
        return weight_VD[only].double()

    expected = [cosine_similarity(row(a), row(b), dim=0) for a, b in pairs[:3]]
    torch.testing.assert_close(found.synonyms_P, torch.stack(expected))
    assert 0 < len(found.random_P) <= 3
    assert found.gap() == pytest.approx(float(found.synonyms_P.mean() - found.random_P.mean()))


def test_words_are_one_token_of_a_sentencepiece_model_too(tmp_path: Path) -> None:
    """Which puts a space before a text, also before one that begins with a space."""
    model = sentencepiece_model(tmp_path / "my.model", TEXT, **KINDS["llama"])
    spelled = ByteVocabulary.open(model)
    weight_VD = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    pairs = [("cat", "mat"), ("dog", "bird"), ("sea", "tree")]
    rows = [[weight_VD[spelled.token_bytes.index(f" {word}".encode())].double() for word in pair] for pair in pairs]
    expected = torch.stack([cosine_similarity(*pair, dim=0) for pair in rows])
    torch.testing.assert_close(similarities(weight_VD, spelled.tokenizer, pairs).synonyms_P, expected)


def test_an_embedding_is_the_same_from_a_run_and_from_its_export(run: Path) -> None:
    for head in ("none", "pmi"):
        folder = export(run, run.parent / head, head).folder
        name = "embed_in.weight" if head == "none" else "gpt_neox.embed_in.weight"
        weight_VD, tokenizer = load_input_embedding(folder)
        assert tokenizer == folder / "tokenizer.json"
        assert torch.equal(weight_VD, load_file(folder / "model.safetensors")[name])
        assert torch.equal(weight_VD, load_input_embedding(run)[0])


def test_an_embedding_is_read_where_only_the_tied_head_is_stored(run: Path) -> None:
    """And the tokenizer is one of SentencePiece."""
    folder = export(run, run.parent / "out", "tied").folder
    weights = load_file(folder / "model.safetensors")
    embedding = weights.pop("gpt_neox.embed_in.weight")
    save_file(weights | {"embed_out.weight": embedding}, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    weight_VD, tokenizer = load_input_embedding(folder)
    assert torch.equal(weight_VD, embedding)
    assert tokenizer == folder / "tokenizer.model"


def test_the_command_draws_several_models(wordnet: Path, run: Path, monkeypatch, capsys) -> None:
    folder, figure = export(run, run.parent / "out", "tied").folder, run.parent / "synonyms.png"
    monkeypatch.setattr(
        sys, "argv", ["synonyms", "--model", str(run), str(folder), "--wordnet", str(wordnet), "--output", str(figure)]
    )
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(TOOL), run_name="__main__")
    assert not stopped.value.code
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "gap" in capsys.readouterr().out


def test_what_is_missing_is_reported(wordnet: Path, run: Path) -> None:
    weight_VD, vocabulary = load_input_embedding(run)
    with pytest.raises(DataError, match="knows none"):
        similarities(weight_VD, load_tokenizer(vocabulary), [("elephant", "pachyderm")])
    with pytest.raises(DataError, match="are too few"):
        similarities(weight_VD, load_tokenizer(vocabulary), [("cat", "mat")])
    (wordnet / "data.verb").write_text("no synset here at all\n")
    with pytest.raises(DataError, match="must hold synsets of WordNet"):
        synonym_pairs(wordnet)
    (wordnet / "data.verb").write_bytes(VERBS.encode() + b"00004001 30 v 01 caf\xe9 0 000 00 | of another encoding\n")
    assert ("sat", "saw") in synonym_pairs(wordnet)
    (wordnet / "data.verb").unlink()
    with pytest.raises(DataError, match=r"lacks it; install Debian's wordnet-base"):
        synonym_pairs(wordnet)
    (run / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"must hold a tokenizer\.json"):
        load_input_embedding(run)
