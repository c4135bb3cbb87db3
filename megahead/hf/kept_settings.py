"""What a Hugging Face folder holds beside its weights: kept with the run that it becomes, given back by its exports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from megahead.config.run import RunConfig
from megahead.data.tokenizer import load_tokenizer
from megahead.files import write_atomically
from megahead.run_folder import RunFolder

CONFIG, GENERATION = "config.json", "generation_config.json"
_PATTERNS = (
    "*config.json",
    "tokenizer.*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
    "*.model",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_AROUND = ("post_processor", "padding", "truncation")
"""Of a tokenizer.json: what it puts around a text."""

_ROLES = {
    "mask_token": ("mask_token",),
    "cls_token": ("cls_token", "bos_token"),
    "sep_token": ("sep_token", "eos_token"),
}
"""How a folder names what an encoder's row needs."""


@dataclass(frozen=True)
class KeptSettings:
    """Settings and the tokenizer's files, by their names in the folder."""

    files: Mapping[str, bytes]

    @staticmethod
    def of_folder(folder: Path) -> KeptSettings:
        """Those of a Hugging Face folder."""
        paths = {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
        return KeptSettings({path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)})

    @staticmethod
    def of_run(run: RunFolder) -> KeptSettings | None:
        """Those of the folder that a run began from; None where it began from none, or an earlier version made it."""
        if not run.published.is_file():
            return None
        with ZipFile(run.published) as archive:
            return KeptSettings({name: archive.read(name) for name in archive.namelist()})

    def keep(self, run: RunFolder) -> None:
        """Puts them into a run's folder."""
        buffer = BytesIO()
        with ZipFile(buffer, "w", ZIP_DEFLATED) as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        write_atomically(run.published, buffer.getvalue())

    def write(self, folder: Path) -> None:
        """Writes all but the model's own, config.json and generation_config.json, into an export's folder."""
        for name in self.files.keys() - {CONFIG, GENERATION}:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(self.files[name])

    def content(self, name: str) -> dict[str, Any]:
        """Of a JSON file; empty where there is none, or no object in it."""
        try:
            content = json.loads(self.files.get(name, b""))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def hold_for(self, config: RunConfig, tokenizer: Path | None) -> bool:
        """Whether a run with this config and tokenizer reads and ends texts as they say."""
        if tokenizer is not None and not self._are_of(tokenizer):
            return False
        if config.masking is not None and not config.model.is_causal:
            roles = self.special_ids(tokenizer).items()
            return all(id_ in (None, getattr(config.masking, role)) for role, id_ in roles)
        ends = self.end_tokens()
        return not ends or config.data.end_token in ends

    def end_tokens(self) -> list[int]:
        """The ids that end a text, the model's first."""
        told = (self.content(name).get("eos_token_id") for name in (CONFIG, GENERATION))
        return [id_ for ids in told if ids is not None for id_ in (ids if isinstance(ids, list) else [ids])]

    def special_ids(self, tokenizer: Path | None) -> dict[str, int | None]:
        """The ids that an encoder masks, begins and ends texts with: as its tokenizer's settings name them, as BERT
        spells them, or as config.json has them; None where nothing says it."""
        vocabulary, config = None if tokenizer is None else load_tokenizer(tokenizer), self.content(CONFIG)
        named = [self.content(name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
        found: dict[str, int | None] = {}
        for role, names in _ROLES.items():
            told = [settings.get(names[0]) for settings in named] + [f"[{role[:-6].upper()}]"]
            told += [settings.get(name) for name in names[1:] for settings in named]
            spelled = [one["content"] if isinstance(one, dict) else one for one in told if one]
            ids = [] if vocabulary is None else [vocabulary.find(name) for name in spelled]
            ids += [config.get(f"{name}_id") for name in names]
            found[role] = next((id_ for id_ in ids if isinstance(id_, int) and id_ < config["vocab_size"]), None)
        return found

    def _are_of(self, tokenizer: Path) -> bool:
        """Whether they are of a tokenizer that gives the same ids."""
        mine, content = [self.files[name] for name in _TOKENIZERS if name in self.files], tokenizer.read_bytes()
        return content in mine or _without_frame(content) in map(_without_frame, mine)


def _without_frame(tokenizer: bytes) -> object:
    try:
        content = json.loads(tokenizer)
    except ValueError:  # of SentencePiece
        return tokenizer
    return {name: part for name, part in content.items() if name not in _AROUND}
