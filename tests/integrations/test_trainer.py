"""Headless models under `Trainer`, alone, on ranks and with DeepSpeed: the steps are those done by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.neftune import neftune_post_forward_hook

from megahead import cwt_loss
from megahead.distributed.group import Group
from megahead.errors import FieldError
from megahead.integrations.transformers import Headless
from support.headless_models import ENCODERS, IDS, MODELS, build, our_batch, rows_of, trained
from support.on_ranks import on_ranks


def stepped_by_hand(name: str, micro: int) -> dict[str, Tensor]:
    """Weights after the same steps, each the mean over the targets of four rows, candidates from `micro` of them."""
    model, rows = build(name), rows_of(name, rows=8)
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
    headless = Headless(build(name))
    trained(tmp_path, headless, name)
    assert_same(headless.state_dict(), stepped_by_hand(name, 1))


@pytest.mark.parametrize("asked", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_blocks_are_recomputed_where_trainer_is_asked_for_it(tmp_path: Path, asked: str) -> None:
    """By the name that this version of transformers calls, or the one that others do."""
    headless, calls = Headless(build("llama")), []
    getattr(headless, asked)()
    headless.body.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    trained(tmp_path, headless, "llama")
    assert len(calls) == 2 * 8
    assert_same(headless.state_dict(), stepped_by_hand("llama", 1))


def rank_trains(group: Group, folder: Path, share: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    ranks = {"RANK": group.rank, "LOCAL_RANK": group.rank, "WORLD_SIZE": group.size, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in ranks.items()})  # from it accelerate knows of them
    headless = Headless(build("llama"), share_candidates=share)
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


def test_counts_are_in_the_checkpoints_of_trainer(tmp_path: Path) -> None:
    headless = Headless(build("llama"))
    trainer = trained(tmp_path, headless, "llama")
    trainer.save_model(str(tmp_path / "saved"))
    again = Headless(build("llama"))
    trainer = Trainer(again, TrainingArguments(str(tmp_path / "next"), use_cpu=True, report_to=[]))
    trainer._load_from_checkpoint(str(tmp_path / "saved"))
    assert again.target_counts.sum() > 0
    assert torch.equal(again.target_counts, headless.target_counts)


def test_noise_on_inputs_leaves_candidates_without_it(tmp_path: Path) -> None:
    """NEFTune's, of which so little that its steps are those without, were candidates not [U, D] to its hook."""
    headless = Headless(build("llama"))
    trained(tmp_path, headless, "llama", neftune_noise_alpha=1e-9)
    assert_same(headless.state_dict(), stepped_by_hand("llama", 1))
    loud, rows = Headless(build("llama")).train(), rows_of("llama")
    loud.body.get_input_embeddings().neftune_noise_alpha = 100.0
    loud.body.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    with torch.no_grad():
        first, second = (loud(**rows)["loss"] for _ in range(2))
        ids = torch.arange(IDS)
        assert torch.equal(loud._rows(ids), loud.body.get_input_embeddings().weight)
    assert first != second
    loss = loud(rows["input_ids"], torch.full_like(rows["labels"], -100))["loss"]
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in loud.parameters())


def test_what_needs_logits_is_refused_in_a_sentence(tmp_path: Path) -> None:
    sentence = "`labels` must be given, but is missing; there are no logits: leave label_smoothing_factor at 0"
    with pytest.raises(FieldError, match=sentence):
        trained(tmp_path, Headless(build("llama")), "llama", label_smoothing_factor=0.1)
    trainer = trained(tmp_path, Headless(build("llama")), "llama")
    with pytest.raises(FieldError, match=sentence):
        trainer.predict([{"input_ids": row} for row in rows_of("llama")["input_ids"]])


def test_a_table_resized_after_wrapping_has_counts_of_its_new_ids(tmp_path: Path) -> None:
    model = build("llama")
    headless = Headless(model)
    model.resize_token_embeddings(IDS + 4, mean_resizing=False)
    rows = rows_of("llama")
    rows["input_ids"][0, 3] = rows["labels"][0, 3] = IDS + 3
    headless.train()(**rows)["loss"].backward()
    assert headless.target_counts[IDS + 3] == 1
    assert len(headless.log_frequencies()) == IDS + 4
    headless.save(tmp_path / "tied", "tied")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "tied").config.vocab_size == IDS + 4


def test_counts_of_a_resized_table_are_loaded_into_one_that_was_resized_too() -> None:
    states = []
    for seed in (0, 1):
        model = build("llama")
        headless = Headless(model)
        model.resize_token_embeddings(IDS + 4, mean_resizing=False)
        if states:
            headless.load_state_dict(states[0])
        else:
            headless.train()(**rows_of("llama", seed))
        assert len(headless.log_frequencies()) == IDS + 4
        states.append(headless.state_dict())
    assert states[0]["target_counts"].sum() > 0
    assert torch.equal(states[1]["target_counts"], states[0]["target_counts"])


@pytest.mark.parametrize(
    "adapted",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [9, 10]}},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=["low rank", "some rows", "whole"],
)
def test_the_table_may_have_an_adapter_too(tmp_path: Path, adapted: dict[str, Any]) -> None:
    model = get_peft_model(Headless(build("llama")), LoraConfig(**adapted))
    table = model.base_model.model.body.get_input_embeddings()
    learning = [weight for weight in table.parameters() if weight.requires_grad]
    assert learning
    with torch.no_grad():
        for weight in learning:
            weight.add_(0.1)  # else the adapter would change nothing yet
        ids = torch.arange(IDS)
        torch.testing.assert_close(model.base_model.model._rows(ids), table(ids))
        adapted_rows = table(ids).clone()
    model(**rows_of("llama"))["loss"].backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in learning)
    with pytest.raises(FieldError, match="`model` must be without adapters"):
        model.base_model.model.save(tmp_path / "adapted", "tied")
    model.merge_and_unload().save(tmp_path / "merged", "tied")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged").get_input_embeddings().weight
    torch.testing.assert_close(merged, adapted_rows)


def test_adapters_of_peft_train_and_are_merged_before_saving(tmp_path: Path) -> None:
    adapted = get_peft_model(Headless(build("llama")), LoraConfig("CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    before = {name: weight.clone() for name, weight in build("llama").base_model.state_dict().items()}
    trained(tmp_path, adapted, "llama")
    headless = adapted.base_model.model
    with pytest.raises(FieldError, match=r"`model` must be without adapters, .* call its merge_and_unload\(\) first"):
        headless.save(tmp_path / "adapted", "tied")
    with pytest.raises(FieldError, match="wrap the plain model by Headless, and that by get_peft_model"):
        Headless(get_peft_model(build("llama"), LoraConfig("CAUSAL_LM", target_modules=["q_proj"])))
    adapted.merge_and_unload().save(tmp_path / "merged", "tied")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged").model.state_dict()
    moved = {name for name, weight in before.items() if not torch.equal(merged[name], weight)}
    assert moved == {f"layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qv"}
