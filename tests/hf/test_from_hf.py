"""A Hugging Face folder becomes a checkpoint, and goes out again bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.loading import config_from_dict
from megahead.distributed import tensors as blocks
from megahead.errors import CheckpointError, FieldError, UserError
from megahead.hf.export import export
from megahead.hf.importing import HFModel, from_hf
from support.sentencepiece_models import sentencepiece_model
from support.small_checkpoint import save_tokenizer
from support.vocabularies import TEXT


def save_theirs(folder: Path, kind=GPTNeoXForCausalLM, shard: str = "1GB", **settings) -> Path:
    """A tiny random model as transformers saves it."""
    torch.manual_seed(0)
    shape = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = GPTNeoXConfig(**shape, intermediate_size=100, eos_token_id=0, max_position_embeddings=64, **settings)
    kind(config).save_pretrained(folder, max_shard_size=shard)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("kind", "tied", "head"),
    [(GPTNeoXForCausalLM, False, "trained"), (GPTNeoXForCausalLM, True, "tied"), (GPTNeoXModel, False, "none")],
)
def test_there_and_back_is_bitwise(tmp_path, kind, tied, head) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    settings = {"use_parallel_residual": False, "hidden_act": "gelu_pytorch_tanh", "rope_parameters": rope}
    theirs = save_theirs(tmp_path / "theirs", kind, tie_word_embeddings=tied, **settings)
    back = export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", head).folder
    before, after = stored(theirs), stored(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    old, new = (GPTNeoXConfig.from_pretrained(folder).to_dict() for folder in (theirs, back))
    for key in ("bos_token_id", "pad_token_id", "megahead", "dtype", "rotary_pct", "rotary_emb_base", "_name_or_path"):
        old.pop(key, None), new.pop(key, None)
    assert old == new


def test_sharded_files_and_the_tokenizer_come_along(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs", shard="40KB")
    save_tokenizer(theirs / "tokenizer.json")
    assert len(list(theirs.glob("*.safetensors"))) > 1
    run = from_hf(theirs, tmp_path / "run")
    assert (run / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    (theirs / "tokenizer.json").unlink()
    model = sentencepiece_model(theirs / "tokenizer.model", TEXT)
    assert (from_hf(theirs, tmp_path / "other") / "tokenizer.model").read_bytes() == model.read_bytes()
    embedding = open_checkpoint(run).read("weight/backbone.embedding.weight")
    assert embedding.shape == (1024, 48)
    assert torch.equal(embedding[:61], stored(theirs)["gpt_neox.embed_in.weight"])
    assert not embedding[61:].any()


def test_settings_of_old_versions_are_understood(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs")
    content = json.loads((theirs / "config.json").read_text())
    del content["rope_parameters"]
    (theirs / "config.json").write_text(json.dumps({**content, "rotary_pct": 1.0, "rotary_emb_base": 777}))
    model = config_from_dict(open_checkpoint(from_hf(theirs, tmp_path / "run")).config).model
    assert (model.rotary_pct, model.rotary_base) == (1.0, 777)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"model_type": "opt"},
            "model_type` must be one of gpt_neox, llama, .*distilbert, .*modernbert-decoder, but is opt",
        ),
        ({"hidden_act": "relu"}, "hidden_act` must be one of"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "no scaling"),
        ({"hidden_size": 50}, "`model.hidden_size` must be a multiple of num_heads"),
        ({"attention_bias": False}, "attention_bias` must be true"),
    ],
)
def test_models_that_ours_cannot_be_are_refused(tmp_path, change, sentence) -> None:
    theirs = save_theirs(tmp_path / "theirs")
    content = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(UserError, match=sentence):
        from_hf(theirs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tensor_too_few_and_one_too_many_are_reported(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs")
    tensors = stored(theirs)
    bias = tensors.pop("gpt_neox.final_layer_norm.bias")
    save_file(tensors, theirs / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weights of backbone\.final_norm\.bias"):
        from_hf(theirs, tmp_path / "run")
    save_file(
        {**tensors, "gpt_neox.final_layer_norm.bias": bias, "extra.weight": bias.clone()}, theirs / "model.safetensors"
    )
    with pytest.raises(FieldError, match=r"extra\.weight"):
        from_hf(theirs, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_backbone_has_no_training_free_head_without_counts(tmp_path: Path) -> None:
    run = from_hf(save_theirs(tmp_path / "theirs", GPTNeoXModel), tmp_path / "run")
    with pytest.raises(CheckpointError, match="counts of its training targets"):
        export(run, tmp_path / "out", "pmi")


def test_a_folder_without_safetensors_is_reported(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    with pytest.raises(CheckpointError, match="save_pretrained"):
        from_hf(tmp_path / "theirs", tmp_path / "run")


def test_an_adapter_that_is_not_merged_is_refused(tmp_path: Path) -> None:
    """transformers would add it to the weights."""
    theirs = save_theirs(tmp_path / "theirs")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (theirs / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"merge_and_unload\(\)"):
        from_hf(theirs, tmp_path / "run")


def test_layer_files_of_the_gpt_neox_library_are_told_apart(tmp_path: Path) -> None:
    step = tmp_path / "theirs" / "global_step10"
    step.mkdir(parents=True)
    (step / "layer_00-model_00-model_states.pt").touch()
    for folder in (step, step.parent):
        with pytest.raises(CheckpointError, match=r"convert it with .*convert_neox_to_hf\.py"):
            from_hf(folder, tmp_path / "run")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights_go_in_and_out_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    theirs = save_theirs(tmp_path / "theirs")
    halved = {name: tensor.to(getattr(torch, dtype)) for name, tensor in stored(theirs).items()}
    save_file(halved, theirs / "model.safetensors", metadata={"format": "pt"})
    after = stored(export(from_hf(theirs, tmp_path / "run"), tmp_path / "back", "trained", dtype=dtype).folder)
    assert after.keys() == halved.keys()
    for name, tensor in halved.items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("shape", [(61, 48), (64, 48), (90, 48)], ids=str)
def test_a_table_is_read_in_blocks_with_its_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    published = HFModel.open(save_theirs(tmp_path / "theirs"))
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 20)
    read = list(published.blocks("backbone.embedding.weight", torch.Size(shape)))
    assert all(len(block) <= 20 for block in read)
    whole = torch.cat(read)
    assert torch.equal(whole[:61], stored(tmp_path / "theirs")["gpt_neox.embed_in.weight"])
    assert whole.shape == shape
    assert not whole[61:].any()
    assert torch.equal(published.weight("backbone.embedding.weight", torch.Size(shape)), whole)
