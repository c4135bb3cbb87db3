"""An export with a pooling opens in sentence-transformers, and its vectors are ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf.test_encoder_export import encoder_config, write_tokenizer
from transformers import AutoTokenizer

from megahead.errors import CheckpointError, FieldError
from megahead.evaluate.retrieval import TextEncoder
from megahead.hf.export import export
from megahead.hf.other_programs import POOLINGS, max_text_tokens, read_pooling
from megahead.hf.trained import TrainedModel
from support.small_checkpoint import save_small, small_config

TEXTS = ["the cat sat", "the dog saw " * 40, "the mat", "sat on the mat and saw the dog"]
TRAINED_LENGTH = 24


def save_encoder(folder: Path, family: str) -> Path:
    config = encoder_config(family=family, vocab_size=64)
    data = config.data.model_copy(update={"sequence_length": TRAINED_LENGTH})
    save_small(folder, config.model_copy(update={"data": data}))
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module", params=[("bert", "none"), ("xlm_roberta", "tied")], ids=" ".join)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    family, head = request.param
    return save_encoder(tmp_path_factory.mktemp(family) / "run", family), head


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_the_runs_by_the_files_own_words(tmp_path: Path, run: tuple[Path, str], pooling: str) -> None:
    folder = export(run[0], tmp_path / "out", run[1], pooling=pooling).folder
    assert read_pooling(folder) == pooling
    assert max_text_tokens(folder, 40) == TRAINED_LENGTH
    modules = json.loads((folder / "modules.json").read_text())
    assert [(folder / module["path"] / "config.json").is_file() for module in modules] == [True] * 3
    card = (folder / "README.md").read_text()
    assert "library_name: sentence-transformers\npipeline_tag: sentence-similarity\n" in card
    tokenizer, backbone = AutoTokenizer.from_pretrained(folder), TrainedModel.open(run[0]).load().backbone
    expected = []
    for text in TEXTS:
        ids_BT = tokenizer(text, truncation=True, max_length=TRAINED_LENGTH, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden_TD = backbone(ids_BT)[0]
        vector_D = hidden_TD[0] if pooling == "cls" else hidden_TD.mean(0)
        expected.append(vector_D / vector_D.norm())
    ours = TextEncoder(folder, max_tokens=max_text_tokens(folder, 40)).vectors(TEXTS)[pooling]
    torch.testing.assert_close(ours.cpu(), torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_sentence_transformers_opens_it_and_has_the_same(tmp_path: Path, run: tuple[Path, str], pooling: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = export(run[0], tmp_path / "out", run[1], pooling=pooling).folder
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert model.max_seq_length == TRAINED_LENGTH
    ours = TextEncoder(folder, max_tokens=TRAINED_LENGTH).vectors(TEXTS)[pooling]
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), ours, atol=1e-5, rtol=0)


def test_what_has_no_such_vectors_is_refused(tmp_path: Path) -> None:
    encoder = save_encoder(tmp_path / "encoder", "bert")
    with pytest.raises(FieldError, match="`--pooling` must be cls or mean, but is max instead"):
        export(encoder, tmp_path / "out", "none", pooling="max")
    save_small(tmp_path / "decoder", small_config())
    with pytest.raises(FieldError, match="`--pooling` must be left out for a decoder, whose tokens read no later ones"):
        export(tmp_path / "decoder", tmp_path / "out", "none", pooling="mean")
    (encoder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="the run must have a tokenizer for --pooling, but has none"):
        export(encoder, tmp_path / "out", "none", pooling="mean")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "modules", "answer"),
    [
        ({"pooling_mode": "cls", "embedding_dimension": 8}, [], "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, ["Normalize"], "mean"),
        ({"pooling_mode": "lasttoken"}, [], "must pool by cls or mean, but pools by lasttoken"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            [],
            "pools by mean, pooling_mode_max_tok",
        ),
        ({"pooling_mode": "cls"}, ["Dense"], "must have no layers after its pooling, but has Dense"),
    ],
)
def test_the_pooling_of_published_folders_is_read(
    tmp_path: Path, settings: dict[str, object], modules: list[str], answer: str
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(settings))
    content = [{"type": f"sentence_transformers.models.{name}", "path": f"9_{name}"} for name in modules]
    content.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (tmp_path / "modules.json").write_text(json.dumps(content))
    if answer in POOLINGS:
        assert read_pooling(tmp_path) == answer
    else:
        with pytest.raises(CheckpointError, match=answer):
            read_pooling(tmp_path)
    assert read_pooling(tmp_path / "elsewhere") is None
    for damaged in ([{"type": "sentence_transformers.models.Pooling"}], ["Pooling"]):
        (tmp_path / "modules.json").write_text(json.dumps(damaged))
        with pytest.raises(CheckpointError, match=r"modules\.json` must give each module's type and path"):
            read_pooling(tmp_path)
