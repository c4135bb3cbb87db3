"""How a run's blocks are computed: chosen, said, refused; and compiled runs learn what plain ones do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import ConfigError
from megahead.models.attention_backends import BACKENDS
from megahead.models.backbone import Backbone
from megahead.models.blocks import CompiledBlocks, SelfAttention
from megahead.models.families import build_backbone
from megahead.objectives.pretraining import build_pretraining
from megahead.report.read import read_metrics
from megahead.train import run as acceleration
from megahead.train.run import configure_blocks_, pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import small_config, stage, write_text

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
COMPILE = {"engine.compile": True}


def told(config: RunConfig, zero: int = 0) -> dict[str, str]:
    return dict(configure_blocks_(build_backbone(config.model), config, CPU, zero))


def test_the_attention_back_end_is_said_and_can_be_set(tmp_path: Path) -> None:
    assert told(small_config(tmp_path)) == {"attention": "documents (torch's scaled dot product, document by document)"}
    half = {"engine.precision": "bf16"}
    assert told(small_config(tmp_path, half))["attention"].startswith("sdpa (")  # short rows, all at once
    assert told(small_config(tmp_path, half | {"model.attention_dropout": 0.1}))["attention"].startswith("documents (")
    assert told(small_config(tmp_path, {"engine.attention": "sdpa"}))["attention"].startswith("sdpa (")
    with pytest.raises(ConfigError, match="must serve this run, but is `flash3` instead; it needs a CUDA device"):
        told(small_config(tmp_path, {"engine.attention": "flash3"}))


def test_blocks_of_auxiliary_objectives_are_computed_as_the_body_is(tmp_path: Path) -> None:
    changes = {"objective.multi_token": {"heads": 2}, "engine.activation_checkpointing": True}
    config = small_config(tmp_path, changes | {"engine.attention": "sdpa"})
    module = build_pretraining(config)
    module.add_module("custom", build_backbone(config.model))  # as an objective of one's own may have one
    configure_blocks_(module, config, CPU)
    layers = [layer for layer in module.modules() if isinstance(layer, SelfAttention)]
    assert len(layers) == 2 + 2 + 2
    assert all(layer.attend == BACKENDS["sdpa"].attend for layer in layers)
    assert all(part.recompute_blocks for part in module.modules() if isinstance(part, Backbone))


@pytest.mark.parametrize(
    ("changes", "zero", "reason"),
    [
        ({"parallel.tensor": 2}, 0, "tensor ranks communicate within a block"),
        ({}, 3, "ZeRO 3 gathers weights within a block"),
        ({"engine.activation_checkpointing": "selective"}, 0, "selective checkpointing looks at operations"),
    ],
)
def test_why_blocks_are_not_compiled_is_said(tmp_path: Path, changes: dict[str, Any], zero: int, reason: str) -> None:
    assert told(small_config(tmp_path, COMPILE | changes), zero)["compiled"].startswith(f"no, {reason}")


def test_auto_compiles_on_cuda_alone_and_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceleration, "choose_backend", lambda wanted, spec: BACKENDS["sdpa"])
    monkeypatch.setattr(acceleration.importlib.util, "find_spec", lambda name: name == "triton")
    config, split = small_config(tmp_path), small_config(tmp_path, {"parallel.tensor": 2})
    backbone = build_backbone(config.model)
    assert "compiled" not in dict(configure_blocks_(backbone, config, CPU))
    assert backbone.compiled is None
    assert dict(configure_blocks_(backbone, config, CUDA, 2))["compiled"] == "one block for all layers"
    assert backbone.compiled is not None
    assert dict(configure_blocks_(backbone, config, CUDA, 3))["compiled"].startswith("no, ZeRO 3")
    assert dict(configure_blocks_(backbone, split, CUDA))["compiled"].startswith("no, tensor ranks")
    assert "compiled" not in dict(configure_blocks_(backbone, small_config(tmp_path, {"engine.compile": False}), CUDA))


MASKS = {"mask_token": 60, "cls_token": 61, "sep_token": 62}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"masking": MASKS}, " but the last (masked tokens alone)"),
        (
            {"masking": MASKS | {"masks_from_layer": 1}},
            " but layer 0 (shorter rows) and the last (masked tokens alone)",
        ),
        (
            {"masking": MASKS | {"dropping": {"from_layer": 0}}},
            " but layer 0 (shorter rows) and the last (masked tokens alone)",
        ),
        (
            {"masking": MASKS | {"mask_decoder_layers": 1}, "model.family": "bert", "model.max_positions": 32},
            " but layers 0 to 1 (shorter rows) and the last (masked tokens alone)",
        ),
        ({"masking": MASKS, "objective.replaced_tokens": {}}, ""),
        ({"masking": MASKS, "objective.phrases": {"group_samples": 2}}, ""),
        ({"masking": MASKS, "model.is_causal": True}, ""),
    ],
    ids=str,
)
def test_which_blocks_of_an_encoder_are_compiled_is_said(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    encoder = {"model.family": "modernbert", "model.vocab_size": 63, "model.intermediate_size": 64}
    assert (
        told(small_config(tmp_path, COMPILE | encoder | changes))["compiled"] == f"one block for all layers{expected}"
    )


def test_without_a_compiler_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert told(small_config(tmp_path, COMPILE))["compiled"] == "no, there is no C++ compiler"


def run(group: Group, config: RunConfig) -> str:
    return pretrain(config, Launch()).ending


def curve(folder: Path, changes: dict[str, Any]) -> list[float]:
    write_text(folder)
    on_ranks(1, run, small_config(folder, changes))
    return [record["loss"] for record in read_metrics(folder / "run").training]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return curve(tmp_path_factory.mktemp("plain"), {})


@pytest.mark.parametrize(("zero", "recompute"), [(0, False), long(1, True), long(2, False)])
def test_a_compiled_run_learns_what_a_plain_one_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    plain: list[float],
    zero: int,
    recompute: bool,
) -> None:
    """Traced and differentiated as for generated code, which is then the operators themselves."""
    monkeypatch.setattr(acceleration, "CompiledBlocks", partial(CompiledBlocks, backend="aot_eager"))
    changes = stage(zero) | COMPILE | {"engine.activation_checkpointing": recompute}
    assert curve(tmp_path, changes) == pytest.approx(plain, abs=1e-5)
    assert "compiled    one block for all layers" in capfd.readouterr().out
