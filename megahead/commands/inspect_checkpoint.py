"""Shows the content of a checkpoint, and whether it is valid: `megahead inspect-checkpoint RUN_OR_STEP_FOLDER`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from megahead.commands import checkpoint_path
from megahead.wording import pluralize

if TYPE_CHECKING:
    from megahead.checkpoints.reading import Checkpoint


def main() -> None:
    """Prints the contents, then verifies every checksum; a damaged checkpoint ends with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder_help = "a step folder, a checkpoints folder, a run folder, or its URL"
    parser.add_argument("folder", type=checkpoint_path, help=folder_help)
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its shape and file")
    arguments = parser.parse_args()
    from megahead.checkpoints.disk import orphaned_folders  # needs torch
    from megahead.checkpoints.reading import open_checkpoint

    checkpoint = open_checkpoint(arguments.folder)
    describe(checkpoint, arguments.tensors)
    for folder in orphaned_folders(arguments.folder):
        print(f"orphaned   {folder}")
    checkpoint.verify()
    print("integrity  valid: every file has its length and checksum")


def describe(checkpoint: Checkpoint, list_tensors: bool) -> None:
    """Prints step, settings, state, sizes and, with `list_tensors`, tensors."""
    size = sum(entry.bytes for entry in checkpoint.files.values())
    tensors, files = pluralize(len(checkpoint.tensors), "tensor"), pluralize(len(checkpoint.files), "file")
    print(f"checkpoint {checkpoint.folder}")
    print(f"run        {checkpoint.config.get('name', '(unnamed)')}, step {checkpoint.step}, {checkpoint.format}")
    print(f"state      {json.dumps(checkpoint.state)}")
    print(f"size       {tensors}, {size:,} bytes in {files}")
    for file, entry in checkpoint.files.items():
        print(f"  {file}  {entry.bytes:,} bytes  sha256 {entry.sha256[:16]}...")
    if list_tensors:
        for name, tensor in checkpoint.tensors.items():
            print(f"  {name}  {tensor.dtype} {list(tensor.shape)}  in {', '.join(tensor.files())}")
