"""Manifests whose checksum is right though their content is not: other programs, or other versions, wrote them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megahead.checkpoints.reading import open_checkpoint
from megahead.distributed.group import Group
from megahead.errors import CheckpointError
from support.saved import save_checkpoint


def sealed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest at `path`, and its checksum with it."""
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    change(content)
    sha256 = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**content, "sha256": sha256}))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda content: content.update(step=-1), "step"),
        (lambda content: content.pop("tensors"), "tensors"),
        (lambda content: content["tensors"]["a"].update(shape="wide"), r"tensors\.a\.shape"),
        (lambda content: content["tensors"]["a"].update(file="../tensors.safetensors"), r"tensors\.a\.file"),
        (lambda content: content["tensors"]["a"].update(file="b.safetensors"), "list of files"),
        (lambda content: content["files"].update({"/etc/passwd": {"bytes": 1, "sha256": ""}}), r"files\./etc/passwd"),
    ],
)
def test_what_is_wrong_in_a_sealed_manifest_is_named(tmp_path: Path, change: Callable[..., Any], where: str) -> None:
    folder = save_checkpoint(tmp_path, 1, [("a", torch.ones(2))], state={}, config={}, group=Group())
    sealed(folder / "checkpoint.json", lambda content: None)
    assert open_checkpoint(folder).step == 1
    sealed(folder / "checkpoint.json", change)
    with pytest.raises(CheckpointError, match=rf"checkpoint\.json` must hold a valid `{where}[\w.`\[]") as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
