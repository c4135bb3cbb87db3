"""Hugging Face's models under its own `Trainer`: the loss is our pretraining's, and what is saved says what it said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CohereConfig,
    CohereForCausalLM,
    ElectraConfig,
    ElectraForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from megahead import cwt_loss
from megahead.convert import from_hf
from megahead.convert.families import family_of
from megahead.convert.source import TrainedModel
from megahead.corpus.vocabulary import save_tokenizer, train_wordpiece
from megahead.data import Batch
from megahead.distributed import Group
from megahead.errors import UserError
from megahead.integrations.transformers import Headless
from megahead.objectives import unique_candidates
from megahead.pretraining import MicroBatch
from support.on_ranks import on_ranks

IDS = 60
SHAPE = {
    "vocab_size": IDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
SMALL = {
    "vocab_size": IDS,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 32,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[Any, Any]] = {
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE, eos_token_id=0)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, num_key_value_heads=2, eos_token_id=0, bos_token_id=0)),
    "bert": (BertForMaskedLM, BertConfig(**SHAPE, **STILL, max_position_embeddings=32)),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig(**SHAPE, local_attention=8, **SPECIAL)),
}
ENCODERS = {"bert", "modernbert"}
JOINED = [("query", "key", "value"), ("gate", "up")]
"""Layers of ours that are one in transformers' ModernBERT."""


def made(name: str) -> PreTrainedModel:
    kind, config = MODELS[name]
    model, generator = kind(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(spread + (1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0))
    return model


def rows_of(name: str, seed: int = 0, rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    """Input ids and labels, of which some are -100: a different number in each row."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(1, IDS, (rows, length), generator=generator)
    labels_BT = ids_BT.clone()
    if name in ENCODERS:
        labels_BT[torch.rand(ids_BT.shape, generator=generator) > 0.3] = -100
    for row in range(rows):
        labels_BT[row, length - row :] = -100
    return {"input_ids": ids_BT, "labels": labels_BT}


def our_batch(name: str, rows: dict[str, Tensor]) -> Batch:
    ids_BT, labels_BT = rows["input_ids"], rows["labels"]
    if name not in ENCODERS:
        ids_BT, labels_BT = ids_BT[:, :-1], labels_BT[:, 1:]
    chosen = labels_BT.flatten() != -100
    return Batch(ids_BT, None, chosen.nonzero().flatten(), labels_BT.flatten()[chosen])


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    trained = train_wordpiece(["the cat saw the rat and the dog"], IDS)
    save_tokenizer(trained, folder / "words.json")
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "words.json"), **names)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_our_own_pretraining(tmp_path: Path, name: str) -> None:
    model, rows = made(name), rows_of(name)
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
    family = family_of(TrainedModel.open(tmp_path / "run").config.model)
    theirs = dict(model.named_parameters())
    for ours_named, parameter in ours.named_parameters():
        gradient = theirs[str(family.their_name(ours_named))].grad
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


def trained(folder: Path, model: Any, name: str, **settings: Any) -> Trainer:
    """A Trainer of two steps of four rows, plain gradient descent, that has done its work."""
    arguments = TrainingArguments(
        str(folder / "trainer"),
        **{"max_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4} | settings,
        use_cpu=True,
        report_to=[],
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        learning_rate=0.1,
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    )
    rows = [{key: value[row] for key, value in rows_of(name, rows=8).items()} for row in range(8)]
    optimizer = None if arguments.deepspeed else torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    return trainer


def stepped_by_hand(name: str, micro: int) -> dict[str, Tensor]:
    """Weights after the same steps, each the mean over the targets of four rows, candidates from `micro` of them."""
    model, rows = made(name), rows_of(name, rows=8)
    body = model.base_model.train()
    for step in (0, 4):
        targets = our_batch(name, {key: value[step : step + 4] for key, value in rows.items()}).target_ids_N.numel()
        body.zero_grad()
        for first in range(step, step + 4, micro):
            part = {key: value[first : first + micro] for key, value in rows.items()}
            batch = our_batch(name, part)
            hidden = body(part["input_ids"]).last_hidden_state
            hidden = hidden if name in ENCODERS else hidden[:, :-1]
            outputs, ids = hidden.flatten(0, 1)[batch.target_index_N], batch.target_ids_N
            (cwt_loss(outputs, ids, body.get_input_embeddings().weight) * ids.numel() / targets).backward()
        with torch.no_grad():
            for parameter in body.parameters():
                parameter -= 0.1 * parameter.grad
    return body.state_dict()


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(
            state[f"body.{key}"], value, rtol=1e-4, atol=1e-6, msg=lambda text, of=key: f"{of}: {text}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_trainer_accumulates_by_the_targets_of_the_whole_step(tmp_path: Path, name: str) -> None:
    headless = Headless(made(name))
    trained(tmp_path, headless, name)
    assert_same(headless.state_dict(), stepped_by_hand(name, 1))


@pytest.mark.parametrize("asked", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_blocks_are_recomputed_where_trainer_is_asked_for_it(tmp_path: Path, asked: str) -> None:
    """By the name that this version of transformers calls, or the one that others do."""
    headless, calls = Headless(made("llama")), []
    getattr(headless, asked)()
    headless.body.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    trained(tmp_path, headless, "llama")
    assert len(calls) == 2 * 8
    assert_same(headless.state_dict(), stepped_by_hand("llama", 1))


def rank_trains(group: Group, folder: Path, share: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    ranks = {"RANK": group.rank, "LOCAL_RANK": group.rank, "WORLD_SIZE": group.size, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in ranks.items()})  # from it accelerate knows of them
    headless = Headless(made("llama"), share_candidates=share)
    trainer = trained(folder, headless, "llama", gradient_accumulation_steps=2, **settings)
    assert trainer.accelerator.num_processes == group.size
    state: dict[str, Tensor] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return state


@pytest.mark.parametrize("share", [False, True])
def test_ranks_train_like_one_process_and_count_all_targets(tmp_path: Path, share: bool) -> None:
    states = on_ranks(2, rank_trains, tmp_path, share, {})
    for state in states:
        assert_same(state, stepped_by_hand("llama", 2 if share else 1))
        counted = our_batch("llama", rows_of("llama", rows=8)).target_ids_N.bincount(minlength=IDS)
        assert torch.equal(state["target_counts"], counted)


@pytest.mark.parametrize("zero", [2, 3])
def test_deepspeed_under_accelerate_trains_the_same(tmp_path: Path, zero: int) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,  # else accelerate's own, 1
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": zero, "stage3_gather_16bit_weights_on_model_save": True},
    }
    state = on_ranks(2, rank_trains, tmp_path, False, {"deepspeed": settings}, timeout=300)[0]
    assert_same(state, stepped_by_hand("llama", 1))
    assert state["target_counts"].sum() == our_batch("llama", rows_of("llama", rows=8)).target_ids_N.numel()


@pytest.mark.parametrize("name", MODELS)
def test_the_saved_head_predicts_what_evaluation_said(tmp_path: Path, name: str) -> None:
    headless = Headless(made(name))
    trainer = trained(tmp_path, headless, name, per_device_eval_batch_size=8)
    told = trainer.evaluate()["eval_loss"]
    headless.save(tmp_path / "out", "pmi", tokenizer(tmp_path))
    kind = AutoModelForMaskedLM if name in ENCODERS else AutoModelForCausalLM
    opened, rows = kind.from_pretrained(tmp_path / "out").eval(), rows_of(name, rows=8)
    with torch.no_grad():
        logits = opened(input_ids=rows["input_ids"]).logits
    batch = our_batch(name, rows)
    logits = (logits if name in ENCODERS else logits[:, :-1]).flatten(0, 1)[batch.target_index_N]
    assert told == pytest.approx(F.cross_entropy(logits, batch.target_ids_N).item(), abs=1e-4)


@pytest.mark.parametrize("head", ["tied", "pmi"])
def test_other_families_have_it_where_the_head_has_a_bias(tmp_path: Path, head: str) -> None:
    model = PhiForCausalLM(PhiConfig(**SHAPE, eos_token_id=0, bos_token_id=0))
    headless, rows = Headless(model), rows_of("llama")
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
            lambda: GPT2LMHeadModel(GPT2Config(**SMALL)),
            "pmi",
            "pmi needs a bias in the head, but a GPT2LMHeadModel has none; use",
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


def test_counts_are_in_the_checkpoints_of_trainer(tmp_path: Path) -> None:
    headless = Headless(made("llama"))
    trainer = trained(tmp_path, headless, "llama")
    trainer.save_model(str(tmp_path / "saved"))
    again = Headless(made("llama"))
    trainer = Trainer(again, TrainingArguments(str(tmp_path / "next"), use_cpu=True, report_to=[]))
    trainer._load_from_checkpoint(str(tmp_path / "saved"))
    assert again.target_counts.sum() > 0
    assert torch.equal(again.target_counts, headless.target_counts)


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
