"""The notebook's cells run one after the other, in a kernel's namespace, smaller than they stand there."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

from support.commands import ROOT
from support.forked import run_script

NOTEBOOK = ROOT / "docs/side-by-side.ipynb"
TINY = {
    "STEPS = 120": "STEPS = 4",
    "VOCAB_SIZE = 4096": "VOCAB_SIZE = 300",
    "topics.values()": "list(topics.values())[:20]",
    '"batch.micro_size=16",': '"batch.micro_size=16", "model.num_layers=1", "model.hidden_size=64",',
    "from IPython.display import Image": "Image = print",
}
"""What is made smaller, or stands for the kernel; each stands somewhere in the notebook."""


def small_program() -> str:
    """The cells of code, made smaller."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells), "results of one machine stay out of the file"
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for large, small in TINY.items():
        assert large in program
        program = program.replace(large, small)
    return program


def test_what_the_notebook_imports_exists() -> None:
    imports = [node for node in ast.walk(ast.parse(small_program())) if isinstance(node, ast.ImportFrom)]
    names = [(node.module, alias.name) for node in imports for alias in node.names]
    assert len(names) > 3
    for module, name in names:
        assert hasattr(importlib.import_module(str(module)), name), (module, name)


@pytest.mark.long
@pytest.mark.slow
def test_the_notebook_runs_in_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text(small_program())
    done = run_script(tmp_path / "cells.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 documents, 2 of them held out" in done.stdout
    assert len(re.findall(r"^(?:headless|vanilla) +(?:tied|pmi|trained) +perplexity [\d.]+$", done.stdout, re.M)) == 3
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "models/notebook/model.safetensors").is_file()
