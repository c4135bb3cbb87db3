"""The page about sequences of items, from its first to its last command, on a small table."""

from __future__ import annotations

import json
import random
from pathlib import Path

from docs.test_pages import run_page

from support.commands import ROOT

PAGE = ROOT / "docs/items.md"
TINY = [
    "model.vocab_size=64",
    "model.hidden_size=16",
    "model.max_positions=32",
    "data.sequence_length=16",
    "batch.global_size=8",
    "batch.micro_size=4",
    "training.steps=4",
    "training.evaluate_every=2",
    "training.checkpoint_every=2",
    "tasks.every=2",
]


def test_the_page_about_items_from_its_first_to_its_last_command(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [f"u{draw.randrange(30)},i{draw.randrange(40)},{time}" for time in range(600)]
    (tmp_path / "events.csv").write_text("\n".join(["user,item,time", *rows]))
    shown = run_page(PAGE, tmp_path, TINY)
    assert "tasks at step 2: next_item hr@10" in shown
    assert "ndcg@10_unseen" in shown
    keys = json.loads((tmp_path / "exports/items/keys.json").read_text())
    assert sorted(keys) == sorted({f"i{number}" for number in range(40)})
    assert (tmp_path / "report.html").is_file()
