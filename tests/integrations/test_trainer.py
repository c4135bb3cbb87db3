"""Headless models under `Trainer`, alone, on ranks and with DeepSpeed: the steps are those done by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Trainer,
    TrainingArguments,
)

from megahead import cwt_loss
from megahead.distributed import Group
from megahead.integrations.transformers import Headless
from support.headless_models import ENCODERS, IDS, MODELS, made, our_batch, rows_of, trained
from support.on_ranks import on_ranks


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


def test_counts_are_in_the_checkpoints_of_trainer(tmp_path: Path) -> None:
    headless = Headless(made("llama"))
    trainer = trained(tmp_path, headless, "llama")
    trainer.save_model(str(tmp_path / "saved"))
    again = Headless(made("llama"))
    trainer = Trainer(again, TrainingArguments(str(tmp_path / "next"), use_cpu=True, report_to=[]))
    trainer._load_from_checkpoint(str(tmp_path / "saved"))
    assert again.target_counts.sum() > 0
    assert torch.equal(again.target_counts, headless.target_counts)
