"""What is left of a session's copies on the nodes that are there, every byte verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megahead.checkpoint import run_long_on_all_ranks, step_of
from megahead.checkpoint.integrity import check_files
from megahead.checkpoint.manifest import MANIFEST, Manifest
from megahead.copies.node_memory import NodeMemory
from megahead.distributed import Group
from megahead.errors import CheckpointError
from megahead.files import sha256_of
from megahead.run_folder import RunFolder

Identity = tuple[int, str]
"""Of a copy: its step, and its manifest's checksum."""


@dataclass
class Found:
    """What one rank found on its node, and verified. Ranks of one node verify a share each."""

    manifests: dict[Identity, Manifest] = field(default_factory=dict)
    sound: dict[Identity, dict[str, Path]] = field(default_factory=dict)
    """Of each copy: files, by name."""

    problems: list[str] = field(default_factory=list)
    """A sentence for each that is not."""

    @staticmethod
    def of(mark: str, than: int, run: RunFolder, group: Group) -> Found:
        """What is newer than step `than`; what others put on disk counts as on the first rank's node. Collective."""
        found, places = Found(), dict[tuple[Identity, str], list[Path]]()
        memory, shared = NodeMemory.of(run), NodeMemory.shared(run)
        nodes = group.all_gather_objects(memory.node())
        here = [rank for rank, node in enumerate(nodes) if node == nodes[group.rank]]
        for folder in memory.copies(mark) + (shared.copies(mark) if here[0] == 0 else []):
            if step_of(folder) > than:
                found._list(folder, places)
        mine = sorted(places)[here.index(group.rank) :: len(here)]
        run_long_on_all_ranks(group, found._verify({file: places[file] for file in mine}), describe_error=str)
        return found

    def _list(self, folder: Path, places: dict[tuple[Identity, str], list[Path]]) -> None:
        try:
            manifest, identity = Manifest.read(folder), (step_of(folder), sha256_of(folder / MANIFEST))
        except (CheckpointError, OSError) as error:
            self.problems.append(str(error))
            return
        self.manifests[identity] = manifest
        for name in manifest.files:
            if (folder / name).exists():  # else another node has it
                places.setdefault((identity, name), []).append(folder / name)

    def _verify(self, places: dict[tuple[Identity, str], list[Path]]) -> Iterator[None]:
        for (identity, name), paths in places.items():
            for path in paths:
                try:
                    yield from check_files(path.parent, {name: self.manifests[identity].files[name]})
                except CheckpointError as error:
                    self.problems.append(str(error))
                else:
                    self.sound.setdefault(identity, {})[name] = path
                    break
