"""Llamas, GPT-2s, Gemmas, decoders of several tokens, and encoders by masked diffusion, RetroMAE or TSDAE train on
every mesh what plain torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.long import long
from support.plain_course import ROWS, Course, assert_equal, config_of, on_mesh, plain_torch
from support.small_run import write_text

LLAMA = {"model.family": "llama", "model.num_key_heads": 1, "model.qk_norm": True}
"""On two tensor ranks both hold the one key head."""


def assert_equals_plain(
    folder: Path, objective: str, stage: int, tensor: int, data: int, changes: dict[str, Any]
) -> None:
    """With four rows of each data rank a step. Plain torch has no table of rows."""
    write_text(folder)
    changes = {"batch.global_size": 4 * data} | changes
    reference = plain_torch(config_of(folder, objective, **(changes | {"engine.embedding": "dense"})))
    assert_equal(on_mesh(folder, objective, stage, tensor, data, **changes), reference)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("plain")
    write_text(folder)
    return plain_torch(config_of(folder, "headless", **LLAMA))


@pytest.mark.parametrize(
    ("stage", "tensor", "data", "changes"),
    [long(stage, 2, 2, {"parallel.sequence": stage % 2 == 0}) for stage in (0, 1, 2, 3)]
    + [(0, 1, 1, {}), (1, 1, 2, {}), long(2, 2, 1, {"parallel.sequence": True})]
    + [(3, 1, 2, {}), long(3, 2, 1, {"engine.activation_checkpointing": True})],
    ids=str,
)
def test_a_llama_equals_plain_torch(
    tmp_path: Path, llama: Course, stage: int, tensor: int, data: int, changes: dict[str, Any]
) -> None:
    write_text(tmp_path)
    assert_equal(on_mesh(tmp_path, "headless", stage, tensor, data, **(LLAMA | changes)), llama)


@pytest.mark.parametrize(("objective", "stage", "tensor", "data"), [long("vanilla", 3, 2, 2), ("tied", 1, 2, 1)])
def test_a_vanilla_llama_equals_plain_torch(tmp_path: Path, objective: str, stage: int, tensor: int, data: int) -> None:
    assert_equals_plain(tmp_path, objective, stage, tensor, data, LLAMA)


@pytest.mark.parametrize(("stage", "tensor", "data"), [long(2, 2, 2), (2, 1, 2), (0, 1, 1)])
def test_a_llama_with_a_table_of_rows_equals_plain_torch(
    tmp_path: Path, llama: Course, stage: int, tensor: int, data: int
) -> None:
    write_text(tmp_path)
    assert_equal(on_mesh(tmp_path, "headless", stage, tensor, data, **(LLAMA | ROWS)), llama)


GPT2 = {"model.family": "gpt2", "model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
GEMMA3 = {"model.family": "gemma3", "model.num_key_heads": 1, "model.local_window": 6, "model.global_every": 2}


@pytest.mark.parametrize(
    ("objective", "stage", "tensor", "data", "changes"),
    [
        long("headless", 2, 1, 2, GPT2 | ROWS),
        long("vanilla", 1, 2, 2, GPT2),
        long("headless", 3, 2, 1, GPT2 | {"parallel.sequence": True}),
        ("headless", 3, 1, 2, GEMMA3),
        ("headless", 3, 2, 1, GPT2 | {"objective.candidates": "own", "parallel.sequence": True}),
        long("headless", 2, 2, 2, GEMMA3 | ROWS),
        long("tied", 1, 2, 1, GEMMA3 | {"parallel.sequence": True}),
    ],
    ids=str,
)
def test_a_gpt2_and_a_gemma_equal_plain_torch(
    tmp_path: Path, objective: str, stage: int, tensor: int, data: int, changes: dict[str, Any]
) -> None:
    assert_equals_plain(tmp_path, objective, stage, tensor, data, changes)


BERT = {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0}
ROBERTA = BERT | {"family": "xlm_roberta", "position_offset": 60}
"""Its padding id is 59."""
MODERNBERT = {"family": "modernbert", "intermediate_size": 64, "local_window": 6}
ENCODER = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "vocab_size": 63,
    "vocab_multiple": 64,
    "max_positions": 32,
}
DIFFUSION = {"masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62, "special_tokens": [59], "diffusion": True}}


@pytest.mark.parametrize(
    ("objective", "stage", "tensor", "data", "model", "changes"),
    [
        ("headless", 0, 1, 1, BERT, {"objective.vanilla_weight": 0.3}),
        long("headless", 2, 2, 2, BERT, {"objective.group_samples": 4, "engine.embedding": "rows"}),
        ("headless", 2, 1, 2, BERT, {"objective.group_samples": 4, "engine.embedding": "rows"}),
        long("headless", 3, 2, 1, MODERNBERT, {"parallel.sequence": True, "objective.group_samples": 1}),
        ("headless", 1, 1, 2, BERT, {"masking.strategy": "frequency"}),
        long("vanilla", 1, 1, 4, BERT, {"batch.micro_size": 1}),
        long("headless", 3, 2, 1, ROBERTA, {}),
        long("vanilla", 2, 2, 2, ROBERTA, {}),
        long("vanilla", 3, 2, 1, MODERNBERT, {}),
        ("vanilla", 1, 2, 1, MODERNBERT, {}),
    ],
    ids=str,
)
def test_masked_diffusion_equals_plain_torch(
    tmp_path: Path, objective: str, stage: int, tensor: int, data: int, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    changes = {"model": ENCODER | model, **DIFFUSION, **changes}
    assert_equals_plain(tmp_path, objective, stage, tensor, data, changes)


MASKING = {"mask_token": 60, "cls_token": 61, "sep_token": 62, "rate": 0.3}
RETROMAE = {"masking": MASKING, "objective.retromae": {}}
BAG = {"objective.retromae.bag_weight": 0.5}


@pytest.mark.parametrize(
    ("objective", "stage", "tensor", "data", "model", "changes"),
    [
        long("headless", 2, 1, 2, BERT, {"objective.group_samples": 4, "engine.embedding": "rows"}),
        ("headless", 3, 2, 1, MODERNBERT, {"parallel.sequence": True, "objective.bias": "once"}),
        ("headless", 1, 1, 2, BERT, {"objective.candidates": "own"}),
        ("vanilla", 1, 2, 1, BERT, {}),
        ("headless", 2, 1, 2, MODERNBERT, {"objective.group_samples": 4, "engine.embedding": "rows", **BAG}),
        long("vanilla", 3, 2, 1, BERT, BAG),
        long("headless", 1, 2, 2, BERT, {"objective.vanilla_weight": 0.3, "objective.group_samples": 8}),
        long("headless", 3, 2, 2, BERT, {"objective.group_samples": 8, "objective.bias": "own_once", **BAG}),
        long("tied", 3, 2, 2, MODERNBERT, {"batch.micro_size": 1}),
        long("headless", 2, 2, 2, MODERNBERT, {"objective.group_samples": 8, "engine.embedding": "rows"}),
    ],
    ids=str,
)
def test_retromae_equals_plain_torch(
    tmp_path: Path, objective: str, stage: int, tensor: int, data: int, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    changes = {"model": ENCODER | model, **RETROMAE, **changes}
    assert_equals_plain(tmp_path, objective, stage, tensor, data, changes)


@pytest.mark.parametrize(
    ("objective", "stage", "tensor", "data", "model", "changes"),
    [
        ("headless", 2, 1, 2, MODERNBERT, {"objective.group_samples": 4, "engine.embedding": "rows"}),
        ("headless", 3, 2, 1, MODERNBERT, {"parallel.sequence": True, "objective.max_candidates": 20}),
        ("tied", 1, 1, 2, BERT, {"masking.masks_from_layer": 1}),
        ("headless", 1, 2, 1, BERT, {"objective.vanilla_weight": 0.3}),
        long("vanilla", 3, 2, 2, MODERNBERT, {"batch.micro_size": 1}),
    ],
    ids=str,
)
def test_tsdae_equals_plain_torch(
    tmp_path: Path, objective: str, stage: int, tensor: int, data: int, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    changes = {"model": ENCODER | model, "masking": dict(MASKING), "objective.tsdae": {}, **changes}
    assert_equals_plain(tmp_path, objective, stage, tensor, data, changes)


MULTI_TOKEN = {"objective.multi_token": {"heads": 2, "weight": 1.0}}


@pytest.mark.parametrize(
    ("objective", "stage", "tensor", "data", "changes"),
    [
        long("headless", 0, 1, 2, {"objective.group_samples": 8}),
        ("headless", 2, 1, 2, ROWS | LLAMA),
        ("headless", 3, 1, 2, GPT2),
        ("vanilla", 1, 2, 1, {}),
        long("headless", 3, 2, 1, LLAMA | {"parallel.sequence": True, "engine.activation_checkpointing": True}),
        long("tied", 2, 2, 2, GEMMA3),
    ],
    ids=str,
)
def test_multi_token_prediction_equals_plain_torch(
    tmp_path: Path, objective: str, stage: int, tensor: int, data: int, changes: dict[str, Any]
) -> None:
    changes = MULTI_TOKEN | changes
    assert_equals_plain(tmp_path, objective, stage, tensor, data, changes)
