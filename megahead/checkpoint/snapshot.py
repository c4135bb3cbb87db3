"""What one rank will write of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megahead.checkpoint.manifest import FileEntry, TensorEntry
from megahead.distributed import Group, RowShard
from megahead.errors import CheckpointError
from megahead.files import fsync, sha256_of


@dataclass(frozen=True)
class Snapshot:
    """This rank's share of a checkpoint's tensors, and the manifest entries of all of them."""

    tensors: dict[str, Tensor]
    file: str
    file_names: list[str]
    entries: dict[str, TensorEntry]
    bytes_of: list[int]
    """About how many bytes each rank will write."""

    @property
    def total_bytes(self) -> int:
        """Of all ranks together."""
        return sum(self.bytes_of)

    @staticmethod
    def take(tensors: Iterable[tuple[str, Tensor | RowShard]], group: Group, *, copied: bool = False) -> Snapshot:
        """Each tensor goes to the rank with the fewest bytes so far (every rank computes the same choice); of a tensor
        that is sharded round-robin each rank writes its own rows.

        `copied`: copy the tensors, so that the originals may change.
        """
        names = [f"tensors-{rank:05d}-of-{group.size:05d}.safetensors" for rank in range(group.size)]
        loads = [0] * group.size
        mine: dict[str, Tensor] = {}
        entries: dict[str, TensorEntry] = {}
        for name, given in tensors:
            writers = range(group.size) if isinstance(given, RowShard) else (loads.index(min(loads)),)
            part, shape = (given.part, given.shape) if isinstance(given, RowShard) else (given, given.shape)
            for rank in writers:
                loads[rank] += shape.numel() * part.itemsize // len(writers)
            files = tuple(names[rank] for rank in writers)
            dtype = str(part.dtype).removeprefix("torch.")
            entries[name] = TensorEntry(file=files if len(files) > 1 else files[0], shape=tuple(shape), dtype=dtype)
            if group.rank in writers:
                mine[name] = part.detach().to("cpu", copy=True).contiguous() if copied else _standalone(part)
        return Snapshot(mine, names[group.rank], names, entries, loads)

    def write(self, folder: Path) -> FileEntry:
        """Writes this rank's file, and reads it back; CheckpointError if it differs then."""
        path = folder / self.file
        save_file(self.tensors, path)
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only the user can read
        fsync(path)
        with safe_open(path, framework="pt") as file:
            wrong = [name for name, tensor in self.tensors.items() if not _same_bytes(tensor, file.get_tensor(name))]
        if wrong:
            raise CheckpointError(
                f"`{path}` must read back as it was written, but {wrong[0]} does not; check the disk."
            )
        return FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))


def _standalone(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous and in a storage of its own, as safetensors requires; copied only if needed."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
