"""Pseudo-perplexity equals masking by hand, one token and one text at a time."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from megahead.commands import pseudo_perplexity as command
from megahead.errors import CheckpointError, DataError
from megahead.evaluate.language_models import pseudo_perplexity
from megahead.hf.loading import load_tokenizer_folder
from support.small_encoder import save_small_encoder

TEXTS = ["the cat sat on the mat", "animals run away from rain and the dog saw it", "no"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A masked language model with random weights, far from uniform."""
    folder = save_small_encoder(tmp_path / "model")
    model = BertForMaskedLM(BertConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def by_hand(folder: Path, max_length: int) -> tuple[int, float]:
    model, tokenizer = BertForMaskedLM.from_pretrained(folder).eval(), load_tokenizer_folder(folder)
    nats = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text, truncation=True, max_length=max_length)["input_ids"]])
        for place in range(1, ids.shape[1] - 1):
            masked = ids.clone()
            masked[0, place] = tokenizer.mask_token_id
            nats.append(-model(masked).logits[0, place].log_softmax(-1)[ids[0, place]].item())
    return len(nats), sum(nats) / len(nats)


@pytest.mark.parametrize("max_length", [6, 128])
def test_every_token_is_guessed_once(folder: Path, max_length: int) -> None:
    found_tokens, perplexity = pseudo_perplexity(folder, TEXTS, max_length=max_length, batch_size=5)
    tokens, loss = by_hand(folder, max_length)
    assert found_tokens == tokens
    assert log(perplexity) == pytest.approx(loss, rel=1e-5)


def test_texts_are_cut_at_the_models_context(folder: Path) -> None:
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    longest = [" ".join([*TEXTS] * positions)]
    tokens, _ = pseudo_perplexity(folder, longest, max_length=2 * positions)
    assert tokens == positions - 2


def test_the_command_shows_each_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    arguments = ["--model", str(folder), "--input", str(tmp_path / "texts.jsonl"), "--texts", "1"]
    monkeypatch.setattr("sys.argv", ["pseudo_perplexity.py", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    command.main()
    tokens, perplexity = pseudo_perplexity(folder, TEXTS[:1])
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == [str(tokens), f"{perplexity:.4g}"]


def test_what_cannot_be_scored_is_reported(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="missing keys: cls"):
        pseudo_perplexity(save_small_encoder(tmp_path / "backbone"), TEXTS)
    with pytest.raises(DataError, match="must hold tokens to predict"):
        pseudo_perplexity(folder, [""])
    with pytest.raises(DataError, match="must hold tokens to predict"):
        pseudo_perplexity(folder, [])
