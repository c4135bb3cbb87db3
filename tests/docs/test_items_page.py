"""The page about sequences of items, from its first to its last command, on a small table."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

from docs.test_pages import commands

from support.commands import ROOT
from support.forked import run_script

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
    for name in ("tools", "launch", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    draw = random.Random(0)
    rows = [f"u{draw.randrange(30)},i{draw.randrange(40)},{time}" for time in range(600)]
    (tmp_path / "events.csv").write_text("\n".join(["user,item,time", *rows]))
    smaller = [word for setting in TINY for word in ("--set", setting)]
    shown = ""
    for command in commands(PAGE, PAGE.read_text()):
        _, *words = shlex.split(command.text)
        done = run_script(*words, *(smaller if "launch/pretrain.py" in words else []), cwd=tmp_path)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        shown += done.stdout
    assert "tasks at step 2: next_item hr@10" in shown
    assert "ndcg@10_unseen" in shown
    keys = json.loads((tmp_path / "exports/items/keys.json").read_text())
    assert sorted(keys) == sorted({f"i{number}" for number in range(40)})
    assert (tmp_path / "report.html").is_file()
