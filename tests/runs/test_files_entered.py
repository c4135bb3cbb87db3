"""How many files of the package a training step and an export enter, and in how many a feature is named: a reader opens
as many."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megahead
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.hf import export as exports
from megahead.hf.trained import TrainedModel
from megahead.train import loop
from megahead.train.run import pretrain
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text

PACKAGE = Path(megahead.__file__).parent


def counting(function: Callable[..., Any], entered: set[str]) -> Callable[..., Any]:
    """`function`, which notes the files of the package whose code it runs; not those of calls that are counted apart
    within it."""

    def note(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            entered.add(frame.f_code.co_filename)

    def counted(*given: Any, **named: Any) -> Any:
        callers = sys.getprofile()
        sys.setprofile(note)
        try:
            return function(*given, **named)
        finally:
            sys.setprofile(callers)

    return counted


def entered_by_steps(group: Group, folder: Path) -> tuple[set[str], set[str]]:
    """Files that a step of a small decoder enters; a turn of the loop, with its line in the log."""
    step, turn = set[str](), set[str]()
    loop.train_step = counting(loop.train_step, step)  # type: ignore[attr-defined]
    pretrain(small_config(folder, {"output_dir": str(folder / "steps")}), Launch())
    loop._advance = counting(loop._advance, turn)
    pretrain(small_config(folder, {"output_dir": str(folder / "turns")}), Launch())
    return step, turn | step


def entered_by_an_export(group: Group, folder: Path) -> tuple[set[str], set[str], set[str]]:
    """Files that the export of a small decoder enters: to open what was trained, which checks the run's settings; to
    write the folder; to compare it with the model, which runs."""
    opened, written, compared = set[str](), set[str](), set[str]()
    pretrain(small_config(folder, {"output_dir": str(folder / "run")}), Launch())
    TrainedModel.open = staticmethod(counting(TrainedModel.open, opened))  # type: ignore[method-assign]
    exports.verify = counting(exports.verify, compared)  # type: ignore[attr-defined]
    counting(exports.export, written)(folder / "run", folder / "out", "pmi")
    return opened, written, compared


def test_a_step_enters_few_files(tmp_path: Path) -> None:
    write_text(tmp_path)
    ((step, turn),) = on_ranks(1, entered_by_steps, tmp_path)
    assert 10 < len(step) <= 20, sorted(step)
    assert len(turn) <= 28, sorted(turn)


def test_an_export_enters_few_files(tmp_path: Path) -> None:
    write_text(tmp_path)
    ((opened, written, compared),) = on_ranks(1, entered_by_an_export, tmp_path)
    assert 10 < len(written) <= 20, sorted(written)
    assert 10 < len(opened) <= 16, sorted(opened)
    assert 10 < len(compared) <= 20, sorted(compared)
    assert len(opened | written | compared) <= 35, sorted(opened | written | compared)


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (r"replaced_tokens|ReplacedTokens|[Dd]etection|classified", 6),
        (r"[Pp]hrase", 6),
        (r"[Dd]ropping", 6),
        (
            r"replicate_every|NodeMemory|checkpoints\.memory|Replicas\b|replicate\(|in-memory|cop(y|ies) in memory",
            6,
        ),
        (r"[Ss]hards?(ed)?[_ ]embedding|Row(Plan|Table|Engine)|rows_(fetched|late)", 10),
    ],
)
def test_a_feature_is_named_in_few_files(pattern: str, most: int) -> None:
    named = [path for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text(encoding="utf-8"))]
    assert 2 <= len(named) <= most, named
