"""Hugging Face's models, headless: the loss is our pretraining's, and what is saved says what it said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    CohereConfig,
    CohereForCausalLM,
    ElectraConfig,
    ElectraForMaskedLM,
    FuyuConfig,
    FuyuForCausalLM,
    GenerationConfig,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megahead.errors import UserError
from megahead.hf.heads import export_family
from megahead.hf.importing import from_hf
from megahead.hf.trained import TrainedModel
from megahead.integrations.transformers import Headless
from megahead.losses.candidates import unique_candidates
from megahead.objectives.micro_batch import MicroBatch
from support.headless_models import ENCODERS, IDS, MODELS, SHAPE, build, our_batch, rows_of, tokenizer, trained

SMALL = {
    "vocab_size": IDS,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 32,
    "eos_token_id": 0,
    "bos_token_id": 0,
}

JOINED = [("query", "key", "value"), ("gate", "up")]
"""Layers of ours that are one in transformers' ModernBERT."""


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_our_own_pretraining(tmp_path: Path, name: str) -> None:
    model, rows = build(name), rows_of(name)
    headless = Headless(model).train()
    headless.body.save_pretrained(tmp_path / "body")
    if name in ENCODERS:
        tokenizer(tmp_path).save_pretrained(tmp_path / "body")
    ours = TrainedModel.open(from_hf(tmp_path / "body", tmp_path / "run")).load().train()
    batch = our_batch(name, rows)
    expected = ours(MicroBatch(batch, (unique_candidates(batch.target_ids_N),), 1 / 17))
    expected.backward()
    loss = headless(**rows, num_items_in_batch=torch.tensor(17))["loss"]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    family = export_family(TrainedModel.open(tmp_path / "run").config.model)
    theirs = dict(model.named_parameters())
    for ours_named, parameter in ours.named_parameters():
        gradient = theirs[str(family.names.to_hf(ours_named))].grad
        assert gradient is not None
        joined = next((layers for layers in JOINED if name == "modernbert" and ours_named.split(".")[-2] in layers), ())
        gradient = gradient.chunk(len(joined))[joined.index(ours_named.split(".")[-2])] if joined else gradient
        torch.testing.assert_close(
            gradient,
            parameter.grad[: len(gradient)],
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, of=ours_named: f"{of}: {text}",
        )
    mean = headless(**rows)["loss"]
    torch.testing.assert_close(mean, 17 * loss / batch.target_ids_N.numel())
    assert headless.target_counts.sum() == 2 * batch.target_ids_N.numel()


@pytest.mark.parametrize("name", MODELS)
def test_the_saved_head_predicts_what_evaluation_said(tmp_path: Path, name: str) -> None:
    headless = Headless(build(name))
    trainer = trained(tmp_path, headless, name, per_device_eval_batch_size=8)
    told = trainer.evaluate()["eval_loss"]
    headless.save(tmp_path / "out", "pmi", tokenizer(tmp_path))
    assert f'from_pretrained("{tmp_path}/out")' in (tmp_path / "out/README.md").read_text()
    kind = AutoModelForMaskedLM if name in ENCODERS else AutoModelForCausalLM
    opened, rows = kind.from_pretrained(tmp_path / "out").eval(), rows_of(name, rows=8)
    with torch.no_grad():
        logits = opened(input_ids=rows["input_ids"]).logits
    batch = our_batch(name, rows)
    logits = (logits if name in ENCODERS else logits[:, :-1]).flatten(0, 1)[batch.target_index_N]
    assert told == pytest.approx(F.cross_entropy(logits, batch.target_ids_N).item(), abs=1e-4)


def phi() -> PhiForCausalLM:
    return PhiForCausalLM(PhiConfig(**SHAPE, eos_token_id=0, bos_token_id=0))


def fuyu() -> FuyuForCausalLM:
    """For images, too: its text has a config of its own."""
    text = {**SHAPE, "model_type": "persimmon", "pad_token_id": 0}
    return FuyuForCausalLM(FuyuConfig(vocab_size=IDS, text_config=text, image_size=8, patch_size=4))


@pytest.mark.parametrize(("model", "head"), [(phi, "tied"), (phi, "pmi"), (fuyu, "tied")])
def test_other_families_have_it_where_the_head_has_a_bias(tmp_path: Path, model: Any, head: str) -> None:
    headless, rows = Headless(model()), rows_of("llama")
    headless(**rows)
    headless.save(tmp_path / "out", head)  # type: ignore[arg-type]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        outputs = headless.eval().body(rows["input_ids"]).last_hidden_state
        expected = outputs @ headless.body.get_input_embeddings().weight.T
        expected = expected + headless.log_frequencies() if head == "pmi" else expected
        torch.testing.assert_close(opened(rows["input_ids"]).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "head", "sentence"),
    [
        (
            lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**SMALL)),
            "pmi",
            "pmi needs a bias in the head, but a GPTBigCodeForCausalLM has none; use",
        ),
        (
            lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.5, eos_token_id=0, bos_token_id=0)),
            "tied",
            "must be none for a CohereForCausalLM, but is not; it does more to its outputs than",
        ),
    ],
)
def test_a_head_that_would_say_something_else_is_refused(tmp_path: Path, model: Any, head: Any, sentence: str) -> None:
    headless = Headless(model())
    headless(**rows_of("llama"))
    with pytest.raises(UserError, match=sentence):
        headless.save(tmp_path / "out", head)
    assert not (tmp_path / "out").exists()
    headless.save(tmp_path / "out", "none")
    assert AutoModel.from_pretrained(tmp_path / "out").config.vocab_size == IDS


def test_a_batch_without_targets_has_no_share_in_the_held_out_loss() -> None:
    headless, rows = Headless(build("bert")), rows_of("bert")
    nowhere = {**rows, "labels": torch.full_like(rows["labels"], -100)}
    assert headless.train()(**nowhere)["loss"] == 0
    assert headless.eval()(**nowhere)["loss"].isnan()


def test_special_tokens_stay_those_of_the_model_and_its_tokenizer(tmp_path: Path) -> None:
    kind, config = MODELS["llama"]
    model = kind(type(config)(**config.to_dict() | {"pad_token_id": 7, "bos_token_id": 5, "eos_token_id": 6}))
    words = tokenizer(tmp_path)
    words.add_special_tokens({"additional_special_tokens": ["[CLS]"], "bos_token": "[SEP]"})
    words.chat_template = "{{ messages[0]['content'] }}"
    headless = Headless(model)
    for _ in range(2):  # a second one replaces the first
        headless.save(tmp_path / "out", "tied", words)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for settings in (opened.config, opened.generation_config):
        assert (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id) == (7, 5, 6)
    back = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert back.special_tokens_map == words.special_tokens_map
    assert back.chat_template == words.chat_template


@pytest.mark.parametrize("build_model", [lambda: build("llama"), phi], ids=["ours", "another family"])
def test_settings_of_generation_are_saved_with_a_head(tmp_path: Path, build_model: Any) -> None:
    model = build_model()
    model.generation_config = GenerationConfig(eos_token_id=[3, 4], temperature=0.6, do_sample=True)
    Headless(model).save(tmp_path / "out", "tied")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (saved.eos_token_id, saved.temperature, saved.do_sample) == ([3, 4], 0.6, True)


def test_what_is_no_run_of_ours_without_more_goes_out_as_it_is_without_a_head(tmp_path: Path) -> None:
    """An encoder without a tokenizer; one that is a decoder, which our BERT is not."""
    kind, config = MODELS["bert"]
    Headless(kind(config)).save(tmp_path / "alone", "none")
    assert AutoModel.from_pretrained(tmp_path / "alone").config.vocab_size == IDS
    decoder = Headless(BertLMHeadModel(BertConfig(**config.to_dict() | {"is_decoder": True})))
    decoder.save(tmp_path / "decoder", "none", tokenizer(tmp_path))
    ids = torch.randint(IDS, (1, 8))
    with torch.no_grad():
        expected = decoder.eval().body(ids).last_hidden_state
        found = AutoModel.from_pretrained(tmp_path / "decoder").eval()(ids).last_hidden_state
    torch.testing.assert_close(found, expected)
    with pytest.raises(UserError, match=r"is_decoder` must be false, as our BERT reads in both directions"):
        from_hf(tmp_path / "decoder", tmp_path / "run")


def test_a_head_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`head` must be one of none, tied, pmi, but is trained instead"):
        Headless(build("llama")).save(tmp_path / "out", "trained")


def test_each_candidate_gets_a_gradient_that_of_padding_too(tmp_path: Path) -> None:
    kind, config = MODELS["llama"]
    model = kind(type(config)(**config.to_dict() | {"pad_token_id": 7}))
    assert model.get_input_embeddings().padding_idx == 7
    ids = torch.tensor([[3, 7, 5, 7]])
    headless = Headless(model)
    headless(input_ids=ids, labels=ids)["loss"].backward()
    assert model.get_input_embeddings().weight.grad[7].abs().max() > 0


def test_a_class_without_a_place_for_the_bias_is_refused(tmp_path: Path) -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8, eos_token_id=0, bos_token_id=0))
    headless = Headless(model)
    headless(**rows_of("llama"))
    with pytest.raises(UserError, match="`--head pmi` needs a bias in the head, but no class of transformers has one"):
        headless.save(tmp_path / "out", "pmi")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            lambda: BertForSequenceClassification(MODELS["bert"][1]),
            "`model` must be a causal or masked language model, but is a Bert",
        ),
        (
            lambda: ElectraForMaskedLM(ElectraConfig(**SHAPE, embedding_size=16)),
            r"as wide as its outputs \(32\), but is one of width 16",
        ),
    ],
)
def test_models_that_cannot_be_headless_are_refused(model: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Headless(model())
