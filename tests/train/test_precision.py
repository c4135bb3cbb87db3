"""`engine.precision: auto` is bf16 where every rank multiplies fast in it; what was given stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from megahead.distributed.group import Group
from megahead.train import run as rule
from megahead.train.run import pretrain
from support.forked import forked
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capabilities", "settled"),
    [
        ({"avx512_f": True, "amx_bf16": True, "avx512_bf16": True}, "bf16"),
        ({"avx512_f": True, "amx_bf16": False, "avx512_bf16": True}, "bf16"),
        ({"avx512_f": True, "avx512_bf16": False}, "fp32"),
        ({"avx2": True}, "fp32"),
    ],
)
def test_auto_takes_bf16_where_the_cpu_multiplies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], settled: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    config = small_config(tmp_path, {"engine.precision": "auto"})
    assert rule.resolve_precision(config, CPU, Group()).engine.precision == settled


def test_a_torch_that_does_not_tell_counts_as_slow(monkeypatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not rule.has_fast_bf16(CPU)


def test_what_was_given_stays(tmp_path) -> None:
    config = small_config(tmp_path, {"engine.precision": "fp16"})
    assert rule.resolve_precision(config, CPU, Group()) is config


def test_one_slow_rank_settles_it_for_all(tmp_path, monkeypatch) -> None:
    config = small_config(tmp_path, {"engine.precision": "auto"})

    def settled(group: Group) -> str:
        rule.has_fast_bf16 = lambda _: group.rank == 0  # in a process of its own
        return rule.resolve_precision(config, CPU, group).engine.precision

    assert on_ranks(2, settled) == ["fp32", "fp32"]


@pytest.mark.parametrize(("fast", "settled"), [(True, "bf16"), (False, "fp32")])
def test_a_run_trains_in_what_it_settled_on_and_says_so(tmp_path, capfd, fast: bool, settled: str) -> None:
    write_text(tmp_path)
    forked(_trained, tmp_path, fast)
    (engine,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("engine"))
    assert engine.endswith(f", {settled} (by auto)")
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["engine"]["precision"] == settled


def _trained(folder: Path, fast: bool) -> None:
    rule.has_fast_bf16 = lambda _: fast
    assert pretrain(small_config(folder, {"engine.precision": "auto"})).step == 6
