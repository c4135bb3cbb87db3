"""The oracle's recordings: equal where nothing changed, different where anything did."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from oracle.record import differences, recorded, write_text


def test_what_differs_is_named_by_its_place() -> None:
    before = {"run": {"metrics": [{"loss": 1.0}, {"loss": 2.0}], "tensors": {"0/w": "ab"}}, "other": 1}
    assert list(differences(before, copy.deepcopy(before))) == []
    after = copy.deepcopy(before) | {"later": 2}
    after["run"]["metrics"][1]["loss"] += 1e-12
    after["run"]["tensors"] = {}
    del after["other"]
    assert [line.split(" ->")[0] for line in differences(before, after)] == [
        "/later: new",
        "/other: gone",
        "/run/metrics/1/loss: 2.0",
        "/run/tensors/0/w: gone",
    ]


@pytest.mark.long
def test_a_recording_equals_itself_and_shows_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write_text()
        found.append(recorded(["gpt_neox"]))
    first, second = found
    assert list(differences(first, second)) == []
    assert len(first["gpt_neox-1"]["tensors"]) > 100
    assert first["gpt_neox-1"]["exports"]["pmi"]["config.json"]["vocab_size"] == 60
    changed = copy.deepcopy(second)
    changed["gpt_neox-1"]["metrics"][1]["loss"] += 1e-12
    del changed["gpt_neox-2"]
    assert [line.split(":")[0] for line in differences(first, changed)] == ["/gpt_neox-1/metrics/1/loss", "/gpt_neox-2"]
