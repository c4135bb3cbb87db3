"""A mistake that all ranks find is told once, and each rank still ends with code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from megahead.commands import report_once
from megahead.errors import UserError
from support.commands import SCRIPT, TORCHRUN, config_file, free_port
from support.forked import fork_pythons, run_script
from support.killable import codes, said, start_ranks
from support.small_run import small_config, write_text


def outputs(folder: Path) -> list[str]:
    return [said(folder, rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("changes", "resume", "sentence"),
    [
        ({"data.validation": "nowhere"}, "auto", "nowhere"),  # found before ranks are connected
        ({}, "nowhere", "`--resume` must be auto, never or a checkpoint folder"),  # and after
    ],
)
def test_one_rank_speaks_for_all(tmp_path: Path, changes: dict[str, str], resume: str, sentence: str) -> None:
    write_text(tmp_path)
    assert codes(start_ranks(small_config(tmp_path, changes), 2, tmp_path, resume)) == [2, 2]
    assert sorted(output.count("error: ") for output in outputs(tmp_path)) == [0, 1]
    assert sentence in "".join(outputs(tmp_path))


def test_each_rank_tells_a_mistake_of_its_own(tmp_path: Path) -> None:
    write_text(tmp_path)

    def mistaken(rank: int) -> None:
        raise UserError(f"rank {rank} must be right, but is wrong.")

    assert codes(start_ranks(small_config(tmp_path), 2, tmp_path, sabotage=mistaken)) == [2, 2]
    assert outputs(tmp_path) == [f"error: rank {rank} must be right, but is wrong.\n" for rank in range(2)]


def test_under_torchrun_a_wrong_setting_is_told_once_and_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_pythons(monkeypatch)
    launcher = (TORCHRUN, "--nproc_per_node", 2, "--master_port", free_port())
    done = run_script(*launcher, SCRIPT, "--config", config_file(tmp_path), "--set", "model.hiden_size=3")
    assert done.returncode != 0
    ours, _, summary = done.stderr.partition("ChildFailedError")
    sentence = "did you mean `model.hidden_size`?"
    assert ours.count(sentence) == 1
    assert sentence in summary.strip().splitlines()[-2], "torchrun's summary of the failure has it last"


def test_a_mistake_is_told_where_torchruns_own_folder_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone/error.json"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    report_once("the disk must have room, but has none.")
    assert capsys.readouterr().err == "error: the disk must have room, but has none.\n"
