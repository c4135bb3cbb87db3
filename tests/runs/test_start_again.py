"""`megahead start` where a run is already there: it goes on with that run and its text, or says why not."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from megahead import quickstart
from megahead.errors import FieldError
from megahead.quickstart import SHAPES, Plan, start


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text; nothing is measured, trained or exported."""
    monkeypatch.setattr(quickstart, "make_plan", lambda *_: Plan(SHAPES[0], 512, 10_000.0, 1.0))
    for name in ("_pretrain", "_train_until", "_export_results"):
        monkeypatch.setattr(quickstart, name, lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    text = "\n".join(topics[name] for name in sorted(topics))
    Path("texts/a.txt").write_bytes(text.encode("ascii", "replace")[:40_000])
    return Path("texts")


def told(texts: Path, **options: Any) -> list[str]:
    lines = list[str]()
    start(texts, report=lines.append, **options)
    return lines


@pytest.mark.parametrize("folder", [None, "texts/made"], ids=["beside", "within"])
def test_a_run_goes_on_with_its_text_alone(texts: Path, folder: str | None) -> None:
    told(texts, folder=folder)
    config = Path(folder or "texts-headless") / "run.yaml"
    (config.parent / "notes.txt").write_text("of the run")
    assert "is there: the run goes on with it" in told(texts, folder=folder)[0]
    (texts / "added.jsonl").write_text(json.dumps({"text": "more"}))
    says = (
        r"`--folder` must hold nothing .* than .*/texts \(2 files, 40,016 bytes\), but is .*, made of .*/texts "
        r"\(1 file, 40,000 bytes\) instead; name another folder, or finish that run by "
        rf"`megahead pretrain --config {config}`\."
    )
    for dry_run in (False, True):
        with pytest.raises(FieldError, match=says):
            start(texts, folder=folder, dry_run=dry_run)
    first, _, settings = config.read_text().partition("\n")
    config.write_text(f"{first.partition(' (')[0]}\n{settings}")  # by an earlier version
    assert "is there: the run goes on with it" in told(texts, folder=folder)[0]


def test_a_dry_run_says_that_a_run_is_there_and_what_does_not_count(texts: Path) -> None:
    told(texts)
    assert told(texts, tokenizer="other.json", dry_run=True) == [
        "texts-headless/run.yaml is there: the run goes on with it, and --minutes and --tokenizer do not count; "
        "raise `training.steps` there, or name another --folder"
    ]
