"""The page about search, from its first command to its search, on little text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from docs.test_pages import run_page
from hf.test_encoder_export import write_tokenizer

from megahead.hf.other_programs import read_pooling
from support.commands import ROOT
from support.forked import run_script

PAGE = ROOT / "docs/retrieval.md"
TINY = [
    "model.vocab_size=64",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.max_positions=32",
    "data.sequence_length=16",
    "data.end_token=3",
    "masking.mask_token=4",
    "masking.cls_token=2",
    "masking.sep_token=3",
    "batch.global_size=8",
    "batch.micro_size=8",
    "training.steps=2",
    "training.evaluate_every=2",
    "training.checkpoint_every=2",
]


def test_the_page_about_search_from_its_first_command_to_its_search(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "data/bert-base-uncased-tokenizer.json")
    rows = [{"title": f"cat {k}", "text": f"The cat sat {k} times. The dog saw the mat."} for k in range(60)]
    for name in ("documents", "held-out"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "queries.txt").write_text("the dog\nthe cat sat\n")
    shown = run_page(PAGE, tmp_path, TINY)
    assert "title_cls_recall@10" in shown
    assert "wrote queries.npy: 2 vectors of 32 features (cls, length 1)" in shown
    assert read_pooling(tmp_path / "models/search") == "cls"
    (search,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "search.py").write_text(search)
    done = run_script("search.py", cwd=tmp_path)
    products = np.load(tmp_path / "queries.npy") @ np.load(tmp_path / "documents.npy").T
    assert done.stdout.split()[0].strip("[") == str(products[0].argmax()), done.stderr
