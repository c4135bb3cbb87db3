"""`megahead embed` writes the vector that each text has by itself; what it cannot read is one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hf.test_pooling import save_encoder
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertModel

from megahead.__main__ import main
from megahead.evaluate import retrieval
from megahead.hf.export import export
from megahead.hf.loading import load_tokenizer_folder
from support.small_checkpoint import save_small, save_tokenizer, small_config
from support.small_encoder import save_small_encoder

TEXTS = ["the cat sat", "the dog saw " * 40, "the mat", "cat", "sat on the mat and saw the dog"] * 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face encoder with 64 positions, in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = save_small_encoder(tmp_path / "model")
    BertForMaskedLM(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def embed(monkeypatch: pytest.MonkeyPatch, words: str) -> int | str | None:
    """The exit code."""
    monkeypatch.setattr(sys, "argv", ["megahead", "embed", *words.split()])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl"])
def test_a_row_is_the_vector_of_its_text_by_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pooling: str, name: str
) -> None:
    """In groups of 4 of which each is sorted by length; longer texts are truncated and counted."""
    monkeypatch.setattr(retrieval, "_GROUP_TEXTS", 4)
    lines = TEXTS if name.endswith("txt") else [json.dumps({"text": text}) for text in TEXTS]
    Path(name).write_text("".join(f"{line}\n" for line in lines))
    assert (
        embed(monkeypatch, f"--model model --input {name} --output out/v.npy --pooling {pooling} --batch-size 3") == 0
    )
    assert f"15 vectors of 32 features ({pooling}, length 1)" in (said := capsys.readouterr().out)
    assert "; 3 texts of more than 64 tokens truncated" in said
    vectors = np.load("out/v.npy", mmap_mode="r")
    assert (vectors.dtype, vectors.shape) == (np.float32, (15, 32))
    model, tokenizer = BertModel.from_pretrained(folder).eval(), load_tokenizer_folder(folder)
    for text, vector_D in zip(TEXTS, vectors, strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:62]
        with torch.no_grad():
            hidden_TD = model(torch.tensor([[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]]))[0][0]
        expected_D = F.normalize(hidden_TD[0] if pooling == "cls" else hidden_TD.mean(0), dim=0)
        np.testing.assert_allclose(vector_D, expected_D, atol=1e-5)
    assert [path.name for path in Path("out").iterdir()] == ["v.npy"]


def test_a_run_and_its_export_with_a_pooling_give_the_same_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_encoder(tmp_path / "run", "roberta")
    export("run", "out", "none", pooling="cls")
    Path("texts.txt").write_text("\r\n".join(TEXTS))
    assert embed(monkeypatch, "--model run --pooling cls --input texts.txt --output run.npy") == 0
    assert embed(monkeypatch, "--model out --input texts.txt --output out.npy") == 0
    np.testing.assert_allclose(np.load("run.npy"), np.load("out.npy"), atol=1e-6)
    assert len(np.load("out.npy")) == len(TEXTS)


@pytest.mark.parametrize(
    ("content", "words", "sentence"),
    [
        ("cat\n\ndog\n", "", "`texts.txt:2` must hold text, but is empty; remove it from the input."),
        ("", "", "`texts.txt` must hold texts, but holds none."),
        (b"\xff\n", "", "`texts.txt:1` must be UTF-8 text, but is not"),
        ("cat\n", "", "`--pooling` must be cls or mean, but is missing; `model` names none."),
        ("cat\n", "--output model", "`--output` must name a file, but is the folder model instead."),
        ("cat\n", "--batch-size 0", "`--batch-size` must be at least 1, but is 0 instead."),
        ("cat\n", "--model decoder --pooling mean", "must hold an encoder, whose [CLS] reads the whole text"),
    ],
)
def test_what_cannot_be_embedded_is_one_sentence(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | bytes,
    words: str,
    sentence: str,
) -> None:
    if "decoder" in words:
        save_small(Path("decoder"), small_config(model={"vocab_size": 300}))
        save_tokenizer(Path("decoder/tokenizer.json"))
    Path("texts.txt").write_bytes(content.encode() if isinstance(content, str) else content)
    Path("v.npy").write_text("earlier")
    code = embed(monkeypatch, f"--model {folder.name} --input texts.txt --output v.npy {words}")
    said = capsys.readouterr().err
    assert (code, said.count("error: ")) == (2, 1)
    assert sentence in said
    assert Path("v.npy").read_text() == "earlier"
