"""A model with another vocabulary: kept rows bit by bit, all else as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig, LlamaForCausalLM

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.loading import config_from_dict
from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.data.train_tokenizer import TRAINERS, add_encoder_tokens, save_tokenizer
from megahead.data.vocabulary_map import ByteVocabulary, map_vocabulary
from megahead.errors import UserError
from megahead.hf.export import export
from megahead.hf.revocabulary import revocabulary
from megahead.hf.trained import TrainedModel
from support.forked import run_script
from support.small_checkpoint import save_small, small_config
from support.vocabularies import GERMAN, TEXT, vocabulary

EMBEDDING = "weight/backbone.embedding.weight"
KINDS: dict[str, dict[str, Any]] = {
    "headless": {},
    "tied": {"name": "vanilla", "tied": True},
    "untied": {"name": "vanilla"},
    "biased": {"name": "vanilla", "output_bias": True},
}
MASKING = {"mask_token": 4, "cls_token": 2, "sep_token": 3}


def decoder(ids: int, objective: str = "headless") -> RunConfig:
    return small_config(model={"vocab_size": ids}, objective=KINDS[objective])


def encoder(ids: int, objective: str = "headless") -> RunConfig:
    model = {"vocab_size": ids, "family": "bert", "token_types": 2, "max_positions": 32}
    masking = {**MASKING, "special_tokens": [0]}
    return small_config(model=model, objective=KINDS[objective], masking=masking, data={"end_token": 3})


def saved(run: Path, old: ByteVocabulary, config: RunConfig) -> Path:
    save_small(run, config)
    (run / "tokenizer.json").write_bytes(old.tokenizer.path.read_bytes())
    return run


def tensors(run: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(run)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def logits(run: Path, folder: Path, head: str, encoder: bool = False) -> Tensor:
    export(run, folder, head)  # type: ignore[arg-type]
    kind = AutoModelForMaskedLM if encoder else AutoModelForCausalLM
    with torch.no_grad():
        result: Tensor = kind.from_pretrained(folder).eval()(torch.arange(5, 29).view(2, 12)).logits
    return result


@pytest.mark.parametrize(("objective", "head"), [("headless", "pmi"), ("tied", "trained"), ("untied", "trained")])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_same_tokenizer_changes_no_bit(tmp_path: Path, kind: str, objective: str, head: str) -> None:
    old = vocabulary(tmp_path, "wordpiece" if kind == "encoder" else "bpe")
    ids = len(old.spellings)
    config = (encoder if kind == "encoder" else decoder)(ids, objective)
    run = saved(tmp_path / "run", old, config)
    report = revocabulary(run, old.tokenizer.path, tmp_path / "same")
    assert (report.num_kept, report.num_split, report.num_new, report.old_vocab_size, report.new_vocab_size) == (
        ids,
        0,
        0,
        ids,
        ids,
    )
    before, after = tensors(run), tensors(tmp_path / "same")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        whole = tensor[:ids] if len(tensor) == config.model.padded_vocab_size() else tensor
        assert torch.equal(after[name][: len(whole)], whole), name
    told = [logits(one, tmp_path / f"{one.name}-hf", head, kind == "encoder") for one in (run, tmp_path / "same")]
    assert torch.equal(*told)


@pytest.mark.parametrize("objective", KINDS)
@pytest.mark.parametrize(("kind", "size"), [("bpe", 300), ("bpe", 900), ("sentencepiece", 420)])
def test_shared_rows_stay_and_others_are_means_of_pieces(tmp_path: Path, kind: str, size: int, objective: str) -> None:
    old, new = vocabulary(tmp_path, "bpe"), vocabulary(tmp_path, kind, size, [*TEXT, *GERMAN])
    run = saved(tmp_path / "run", old, decoder(len(old.spellings), objective))
    report = revocabulary(run, new.tokenizer.path, tmp_path / "out")
    translation = map_vocabulary(old, new, {"end": 0})
    assert (report.num_kept, report.num_split, report.num_new) == translation.counts()
    before, after = tensors(run), tensors(tmp_path / "out")
    assert not [name for name in after if name.startswith("state/")]  # counts of another cut of the text
    with_a_row_per_id = [name for name in before if "embedding" in name or "head" in name or "output_bias" in name]
    assert len(with_a_row_per_id) == {"untied": 2, "biased": 3}.get(objective, 1)
    for name in with_a_row_per_id:
        for id_, kept in enumerate(translation.old_ids):
            pieces = translation.old_pieces[id_] if kept is None else [kept]
            if pieces:
                assert torch.equal(after[name][id_], before[name][pieces].double().mean(0).float())
        assert not after[name][len(new.token_bytes) :].any()  # padding
    body = [name for name in before if name.startswith("weight/") and name not in with_a_row_per_id]
    assert len(body) > 10
    assert all(torch.equal(before[name], after[name]) for name in body)
    config = config_from_dict(open_checkpoint(tmp_path / "out").config)
    assert (config.model.vocab_size, config.data.end_token) == (len(new.token_bytes), 0)
    assert len(after[EMBEDDING]) == config.model.padded_vocab_size()


def test_an_encoder_has_its_special_tokens_and_bias_where_the_new_ids_are(tmp_path: Path) -> None:
    save_tokenizer(add_encoder_tokens(TRAINERS["bpe"](TEXT, 400)), tmp_path / "new.json")
    old, new = vocabulary(tmp_path, "wordpiece"), ByteVocabulary.open(tmp_path / "new.json")
    run = saved(tmp_path / "run", old, encoder(len(old.spellings), "tied"))
    revocabulary(run, tmp_path / "new.json", tmp_path / "out")
    config = config_from_dict(open_checkpoint(tmp_path / "out").config)
    cls, sep, mask = (new.tokenizer.id_of(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
    assert config.masking is not None
    assert (config.masking.cls_token, config.masking.sep_token, config.masking.mask_token) == (cls, sep, mask)
    assert config.masking.special_tokens == [0, 1]
    written = yaml.safe_load((tmp_path / "out/model.yaml").read_text())
    assert ModelConfig(**written["model"]) == config.model
    assert written["masking"] == {"mask_token": mask, "cls_token": cls, "sep_token": sep, "special_tokens": [0, 1]}
    before, after = tensors(run), tensors(tmp_path / "out")
    for name in (EMBEDDING, "weight/mask_head.bias"):
        assert torch.equal(after[name][[cls, sep, mask]], before[name][[2, 3, 4]])
    the, cat = new.token_bytes.index(b" the"), old.token_bytes.index(b" the")
    assert torch.equal(after["weight/mask_head.bias"][the], before["weight/mask_head.bias"][cat])
    assert export(tmp_path / "out", tmp_path / "hf", "trained").parity.tokens > 0


def test_positions_of_a_roberta_begin_after_the_new_padding_id(tmp_path: Path) -> None:
    save_tokenizer(add_encoder_tokens(TRAINERS["bpe"](TEXT, 400)), tmp_path / "new.json")  # <|padding|> is 1
    old = vocabulary(tmp_path, "wordpiece")  # [PAD] is 0
    settings = encoder(len(old.spellings), "tied").model_dump(mode="json", exclude_unset=True)
    settings["model"] |= {"family": "xlm_roberta", "position_offset": 1, "token_types": 1}
    electra = config_from_dict(settings | {"objective": {"name": "vanilla", "replaced_tokens": {}}})
    assert revocabulary(saved(tmp_path / "electra", old, electra), tmp_path / "new.json", tmp_path / "moved")
    TrainedModel.open(tmp_path / "moved").load()
    run = saved(tmp_path / "run", old, config_from_dict(settings))
    revocabulary(run, tmp_path / "new.json", tmp_path / "out")
    config = config_from_dict(open_checkpoint(tmp_path / "out").config)
    assert (config.model.position_offset, config.model.padding_token()) == (2, 1)
    before, after = (tensors(folder)["weight/backbone.positions.weight"] for folder in (run, tmp_path / "out"))
    assert torch.equal(after[2:], before[1:])
    assert export(tmp_path / "out", tmp_path / "hf", "trained").parity.tokens > 0
    assert yaml.safe_load((tmp_path / "hf/config.json").read_text())["pad_token_id"] == 1


def test_a_published_model_moves_too_and_can_be_exported(tmp_path: Path) -> None:
    old, new = vocabulary(tmp_path, "bpe"), vocabulary(tmp_path, "sentencepiece", 420)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=512, eos_token_id=0, bos_token_id=0))
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_bytes(old.tokenizer.path.read_bytes())
    arguments = ["--model", tmp_path / "hf", "--tokenizer", new.tokenizer.path, "--output", tmp_path / "out"]
    told = run_script("tools/convert.py", "revocabulary", *arguments).stdout
    kept, pieced, fresh = map_vocabulary(old, new, {"end": 0}).counts()
    sizes = f"{len(new.token_bytes)} ids instead of {len(old.token_bytes)}"
    assert f"{sizes}\n{kept} rows kept, {pieced} of tokens in pieces (" in told
    assert told.rstrip().endswith(f"on average), {fresh} new")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == new.tokenizer.path.read_bytes()
    written = ModelConfig(**yaml.safe_load((tmp_path / "out/model.yaml").read_text())["model"])
    assert written.vocab_size == len(new.token_bytes)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("tmp", "."))]
    export(tmp_path / "out", tmp_path / "back", "trained")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    the = model.get_input_embeddings().weight[old.token_bytes.index(b" the")]
    assert torch.equal(back.get_input_embeddings().weight[new.token_bytes.index(b" the")], the)


def test_methods_differ_where_a_token_is_not_kept(tmp_path: Path) -> None:
    old, new = vocabulary(tmp_path, "bpe"), vocabulary(tmp_path, "bpe", 900, GERMAN)
    run = saved(tmp_path / "run", old, decoder(len(old.spellings)))
    rows = {}
    for method in ("mean", "rarity", "random"):
        revocabulary(run, new.tokenizer.path, tmp_path / method, method)
        rows[method] = tensors(tmp_path / method)[EMBEDDING]
    hunde = new.token_bytes.index(b" hund")
    assert not torch.equal(rows["mean"][hunde], rows["rarity"][hunde])
    assert not torch.equal(rows["mean"][hunde], rows["random"][hunde])
    assert torch.equal(rows["mean"][:2], rows["random"][:2])


def test_what_cannot_be_is_told_in_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    old = vocabulary(tmp_path, "bpe")
    run = saved(tmp_path / "run", old, decoder(len(old.spellings), "untied"))
    encoding = vocabulary(tmp_path, "wordpiece")
    encoder_run = saved(tmp_path / "encoder", encoding, encoder(len(encoding.spellings)))
    small = saved(tmp_path / "small", old, decoder(100))
    bare = tmp_path / "bare"
    save_small(bare, decoder(len(old.spellings)))
    path = old.tokenizer.path
    for model, tokenizer, method, sentence in (
        (run, path, "median", "`--method` must be one of mean, rarity, random, but is median"),
        (run, path, "rarity", "must hold counts of its training targets for --method rarity, but lacks them; use"),
        (encoder_run, path, "mean", r"must have one of \[CLS\], <s>, .* \(`begin` of a text\), but has none"),
        (small, path, "mean", r"must have a row for each id of its tokenizer, but has 100 for \d+"),
        (bare, path, "mean", "must hold a tokenizer.json, but has none; put the model's tokenizer there"),
        (tmp_path, path, "mean", "must hold model weights"),
    ):
        with pytest.raises(UserError, match=sentence):
            revocabulary(model, tokenizer, tmp_path / "out", method)
        assert not (tmp_path / "out").exists()


def test_a_text_ends_as_it_did_where_both_have_that_token(tmp_path: Path) -> None:
    """[SEP] ends texts too, of encoders."""
    old = vocabulary(tmp_path, "bpe")
    save_tokenizer(add_encoder_tokens(TRAINERS["bpe"](TEXT, 400)), tmp_path / "both.json")
    revocabulary(saved(tmp_path / "run", old, decoder(len(old.spellings))), tmp_path / "both.json", tmp_path / "out")
    assert config_from_dict(open_checkpoint(tmp_path / "out").config).data.end_token == 0


@pytest.mark.parametrize("kind", ["bpe", "encoder"])
def test_the_token_that_masks_a_decoders_inputs_comes_along(tmp_path: Path, kind: str) -> None:
    """Behind a tokenizer that has none, as before; or as its mask token."""
    old, made = vocabulary(tmp_path, "bpe"), TRAINERS["bpe"](TEXT, 400)
    save_tokenizer(add_encoder_tokens(made) if kind == "encoder" else made, tmp_path / "new.json")
    ids, new = len(old.spellings), ByteVocabulary.open(tmp_path / "new.json")
    config = small_config(model={"vocab_size": ids + 1}, masked_inputs={"mask_token": ids})
    run = saved(tmp_path / "run", old, config)
    report = revocabulary(run, tmp_path / "new.json", tmp_path / "out")
    moved = config_from_dict(open_checkpoint(tmp_path / "out").config)
    assert moved.masked_inputs is not None
    mask = moved.masked_inputs.mask_token
    assert mask == (new.tokenizer.id_of("[MASK]") if kind == "encoder" else len(new.spellings))
    assert moved.model.vocab_size == report.new_vocab_size == len(new.spellings) + (kind == "bpe")
    assert torch.equal(tensors(tmp_path / "out")[EMBEDDING][mask], tensors(run)[EMBEDDING][ids])
