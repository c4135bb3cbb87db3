"""docs/integrations.md as a program, on little text and with a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors.torch import load_file

from support.commands import ROOT
from support.forked import run_script
from support.small_checkpoint import save_tokenizer

PAGE = (ROOT / "docs/integrations.md").read_text()
TINY = {
    "hidden_size=256": "hidden_size=32",
    "intermediate_size=688": "intermediate_size=48, bos_token_id=0",
    "num_hidden_layers=6": "num_hidden_layers=1",
    "max_steps=1000": "max_steps=12",
    "per_device_train_batch_size=16": "per_device_train_batch_size=4, use_cpu=True, report_to=[]",
    "learning_rate=1e-3": "learning_rate=1e-2",
    "warmup_steps=50": "warmup_steps=2",
}
"""What is made smaller; each stands on the page."""


def test_the_page_trains_evaluates_and_saves(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer.json")
    stories = [f"the cat saw the rat, the dog met the bird {k} times and sat on the mat" for k in range(300)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for large, small in TINY.items():
        assert large in program
        program = program.replace(large, small)
    (tmp_path / "page.py").write_text(program)
    done = run_script(tmp_path / "page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (perplexity,) = re.findall(r"^perplexity ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(perplexity) < 40  # of some 300 ids
    stored = load_file(tmp_path / "models/llama/model.safetensors")
    assert stored["lm_head.bias"].std() > 0.1
