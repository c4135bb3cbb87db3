"""Minimal pairs of a test's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Pair = tuple[str, str]


def write_blimp(folder: Path, paradigms: dict[tuple[str, str], Sequence[Pair]]) -> Path:
    """Files as published of pairs by (paradigm, field)."""
    folder.mkdir(parents=True)
    for (name, field), pairs in paradigms.items():
        rows = [{"sentence_good": good, "sentence_bad": bad, "field": field, "UID": name} for good, bad in pairs]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
