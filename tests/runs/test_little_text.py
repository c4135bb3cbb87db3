"""`megahead start` with little text: enough is held out to fill a row, or a sentence asks for more."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from megahead import quickstart
from megahead.data.indexed import IndexedDataset
from megahead.errors import FieldError
from megahead.quickstart import SHAPES, Plan, start

PLAN = Plan(SHAPES[0], 512, 3000.0, 1.0)
TEXT = "\n".join(topics[name] for name in sorted(topics))


class Planned(Exception):
    """The datasets are written; the config is next."""


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        raise Planned

    monkeypatch.setattr(quickstart, "make_plan", lambda *_: PLAN)
    monkeypatch.setattr(quickstart, "_write_config", end)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("book.txt", TEXT[:40_000], "1 document, the last 5 % of each held out"),
        ("little.txt", TEXT[:10_100], "1 document, the last 20 % of each held out"),
        (
            "many.jsonl",
            "".join(json.dumps({"text": TEXT[n : n + 83]}) + "\n" for n in range(0, 25_000, 100)),
            "250 documents, 50 held out",
        ),
    ],
)
def test_enough_is_held_out_to_fill_a_row(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    told = list[str]()
    with pytest.raises(Planned):
        start(tmp_path / name, folder=tmp_path / "made", report=told.append)
    assert says in told[-1]
    assert IndexedDataset(tmp_path / "made/text-validation").num_tokens > PLAN.config.data.sequence_length


def test_text_of_which_a_fifth_is_less_than_a_row_is_refused_before_there_is_a_config(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{'word' * 12} " * 250)
    with pytest.raises(FieldError, match=r"`PATH` must have 257 tokens .* but is a\.txt with \d+ instead; add text"):
        start(tmp_path / "a.txt", folder=tmp_path / "made", report=[].append)
    assert not (tmp_path / "made/run.yaml").exists()


@pytest.mark.parametrize(("text", "folder"), [("texts", "."), ("texts", "texts"), ("texts/a.txt", "texts")])
def test_a_folder_with_the_text_in_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts/a.txt").write_text(TEXT[:20_000])
    with pytest.raises(
        FieldError, match=r"`--folder` must be a folder without the text, .* but is .*, which has texts"
    ):
        start(text, folder=folder)
    assert [path.name for path in Path("texts").iterdir()] == ["a.txt"]


def test_what_cannot_be_read_is_named_before_the_rest_is_too_little(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("a few words")
    for encoding in ("latin-1", "utf-16"):
        (tmp_path / f"{encoding}.txt").write_text("déjà vu " * 5000, encoding=encoding)
    told = list[str]()
    with pytest.raises(FieldError, match=r"`PATH` must hold at least 10,000 bytes .* with 11 instead; add text"):
        start(tmp_path, folder=tmp_path / "made", report=told.append)
    assert [line for line in told if "latin-1.txt must be UTF-8" in line]
    assert [line for line in told if "utf-16.txt must be UTF-8" in line]
