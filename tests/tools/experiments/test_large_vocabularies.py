"""Large vocabularies by language, in tiny."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.laboratory import Laboratory
from experiments.large_vocabularies import compare_large_vocabularies
from support.laboratory import TINY, results


def test_large_vocabularies_are_scored_by_language(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"SIZES": (300, 420), "STEPS": 4, "VANILLA_SIZES": (300,), "SHORT_STEPS": 2, "HELD_OUT_BYTES": 2_000}
    for name, value in sizes.items():
        monkeypatch.setattr(f"experiments.large_vocabularies.{name}", value)
    texts = [json.loads(line) for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    languages = ("de", "sw")
    given = [text | {"lang": languages[place % 2]} for place, text in enumerate(texts)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in given))
    settings = [part for part in TINY if not part.startswith(("training.", "data."))] + ["batch.micro_size=8"]
    compare_large_vocabularies(replace(laboratory, settings=[*settings, "data.sequence_length=16"]), [])
    rows = results(laboratory, "large_vocabularies")
    assert [(row["vocabulary"], row["at equal"]) for row in rows] == [
        (size, equal) for size in (300, 420) for equal in ("text", "time")
    ]
    assert [row["steps"] for row in rows[:2]] == [4, 4]
    assert rows[2]["steps"] < rows[3]["steps"] == 4
    assert rows[2]["MB of text"] == pytest.approx(rows[0]["MB of text"], rel=0.2)
    by_language = results(laboratory, "large_vocabularies-languages")
    assert [row["language"] for row in by_language] == ["de", "sw"]
    mean = sum(row["420, equal time"] for row in by_language) / 2
    assert mean == pytest.approx(rows[3]["bits per byte"])
    assert all(1 < row["420: tokens a word"] < row["300: tokens a word"] for row in by_language)
    vanilla, equal_text, equal_time = results(laboratory, "large_vocabularies-vanilla")
    assert [row["objective"] for row in (vanilla, equal_text, equal_time)] == ["vanilla", "headless", "headless"]
    assert vanilla["steps"] == equal_text["steps"] == max(1, round(4 / vanilla["times headless"]))
    assert (equal_time["steps"], equal_time["bits per byte"]) == (4, rows[1]["bits per byte"])
    split = tmp_path / "languages"
    trained, held = ({*(split / f"{name}.jsonl").read_text().splitlines()} for name in ("train", "de"))
    assert held
    assert not trained & held
