"""Folders of others: damaged files are a sentence, padding is what the model takes for it, and a classifier of other
classes can be tuned again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
)

from megahead.errors import CheckpointError, FieldError
from megahead.evaluate.finetuning import Classifier, EncodedExample, FineTuningRun, InitialModel
from megahead.evaluate.glue_tasks import TASKS, Example, TaskData, paper_settings
from megahead.hf.importing import from_hf
from megahead.hf.loading import load_backbone, load_classifier, load_embedding_model, load_tokenizer_folder
from support.small_encoder import save_small_encoder

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"
LOADERS: dict[str, Callable[..., object]] = {
    "backbone": load_backbone,
    "encoder": load_embedding_model,
    "classifier": lambda folder: load_classifier(folder, 2, 0),
}


@pytest.mark.parametrize("damage", ["cut short", "a pointer", "another shape", "of another type", "unknown"])
def test_a_damaged_folder_is_a_sentence_whatever_libraries_raise(tmp_path: Path, damage: str) -> None:
    folder = save_small_encoder(tmp_path / "model")
    weights, config = folder / "model.safetensors", folder / "config.json"
    settings = {"another shape": {"intermediate_size": 128}, "of another type": {"hidden_size": "32"}}
    settings["unknown"] = {"hidden_act": "nonsense"}
    if damage in settings:
        config.write_text(json.dumps(json.loads(config.read_text()) | settings[damage]))
    else:
        weights.write_bytes(weights.read_bytes()[:5000] if damage == "cut short" else LFS_POINTER.encode())
    loaders = dict(LOADERS)
    if damage in ("of another type", "unknown"):  # nothing but config.json is read
        loaders |= {
            "random encoder": lambda folder: load_embedding_model(folder, random_weights=True),
            "random classifier": lambda folder: load_classifier(folder, 2, 0, random_weights=True),
        }
    for name, load in loaders.items():
        with pytest.raises(CheckpointError, match=r"`.*model` must (be a Hugging Face|hold the weights)"):
            raise AssertionError(f"{name} opened {load(folder)}")


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"vocab_size": "120"}, "vocab_size` must be a whole number, but is '120' instead"),
        ({"model_type": ["bert"]}, "model_type` must be a text"),
        ({"hidden_act": ["gelu"]}, "hidden_act` must be a text"),
        ({"architectures": 5}, "architectures` must be a list"),
        ({"model_type": "llama", "rope_scaling": "linear"}, "rope_scaling` must be an object"),
    ],
)
def test_a_key_of_another_type_is_a_sentence(tmp_path: Path, wrong: dict[str, object], rule: str) -> None:
    config = save_small_encoder(tmp_path / "model") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    with pytest.raises(FieldError, match=f"^`config.json: {rule}"):
        from_hf(tmp_path / "model", tmp_path / "run")


def test_a_special_token_that_is_none_is_not_read(tmp_path: Path) -> None:
    folder = save_small_encoder(tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | {"eos_token_id": -1, "cls_token_id": -1}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": 5, "mask_token": {}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ["[SEP]", None]}))
    ids = yaml.safe_load((from_hf(folder, tmp_path / "run") / "model.yaml").read_text())["masking"]
    assert [ids[name] for name in ("cls_token", "sep_token", "mask_token")] == [2, 3, 4]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_tokenizer_is_a_sentence(tmp_path: Path, name: str) -> None:
    folder = save_small_encoder(tmp_path / "model")
    (folder / name).write_text(LFS_POINTER)
    with pytest.raises(CheckpointError, match=r"`.*model` must be a Hugging Face model folder, but cannot be read"):
        load_tokenizer_folder(folder)


def save_byte_level(folder: Path, special_tokens: list[str], settings: dict[str, object]) -> int:
    """A tokenizer as GPT-2's and RoBERTa's; returns its number of ids."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(special_tokens=special_tokens, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["the cat sat! the dog saw it!"], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"] if not special_tokens else [])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(tokenizer.get_vocab_size())


def encoded(folder: Path, *texts: str) -> tuple[Classifier, list[EncodedExample]]:
    """A classifier of `folder` as fine-tuning begins with it, and the texts as it reads them."""
    examples = [Example(text, (None,), 1) for text in texts]
    data = TaskData("glue/cola", TASKS["glue/cola"], examples, {"cola": examples}, trains_on_dev=False)
    run = FineTuningRun(InitialModel("theirs", folder), data, paper_settings("glue/cola", epochs=1))
    torch.manual_seed(0)
    return Classifier(load_classifier(folder, 2, run._padding).eval(), data.task), run._train


@torch.no_grad()
def test_a_published_roberta_keeps_its_positions(tmp_path: Path) -> None:
    """Its tokenizer_config.json names no padding token, and 0 is [CLS]: padded by that, all positions change."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    size = save_byte_level(tmp_path / "theirs", names, {"model_max_length": 512})
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = RobertaConfig(**shape, vocab_size=size, max_position_embeddings=40, initializer_range=0.3)
    config.type_vocab_size = 1
    torch.manual_seed(0)
    RobertaModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "theirs")
    classifier, rows = encoded(tmp_path / "theirs", "the cat sat", "it")
    torch.manual_seed(0)
    theirs = RobertaForSequenceClassification.from_pretrained(tmp_path / "theirs").eval()
    expected = [theirs(torch.tensor([row.sequences[0][0]])).logits[0] for row in rows]
    torch.testing.assert_close(classifier.outputs(rows), torch.stack(expected))


@torch.no_grad()
def test_a_decoder_without_a_padding_token_reads_a_text_to_its_end(tmp_path: Path) -> None:
    """GPT-2's token 0 is `!`, with which a text may end."""
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    size = save_byte_level(tmp_path / "theirs", [], end)
    torch.manual_seed(0)
    GPT2Model(GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=32)).save_pretrained(
        tmp_path / "theirs"
    )
    classifier, (plain, marked) = encoded(tmp_path / "theirs", "the cat", "the cat!")
    assert marked.sequences[0][0][-1] == 0
    hidden = classifier.model.transformer(torch.tensor([marked.sequences[0][0]])).last_hidden_state
    expected = classifier.model.score(hidden[:, -1])
    torch.testing.assert_close(classifier.outputs([plain, marked])[1:], expected)


def test_a_classifier_of_other_classes_gets_a_new_head(tmp_path: Path) -> None:
    folder = save_small_encoder(tmp_path / "model")
    config = BertConfig.from_pretrained(folder, num_labels=3)
    theirs = BertForSequenceClassification(config)
    theirs.save_pretrained(tmp_path / "tuned")
    shutil.copy(folder / "tokenizer.json", tmp_path / "tuned")
    ours = load_classifier(tmp_path / "tuned", 2, 0)
    assert ours.classifier.weight.shape == (2, 32)
    for (name, mine), other in zip(ours.bert.named_parameters(), theirs.bert.parameters(), strict=True):
        assert torch.equal(mine, other), name
