"""The parts of tools/gpu_report.py by priority, in full size for a GPU and tiny for a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.command import PYTHIA_VOCABULARY, zipf_tokens
from megahead.data.writer import IndexedDatasetWriter

RESULT, SECONDS = "{result}", "{seconds}"  # in a part's command: the JSON file to write, and its time limit
STARTUP_SECONDS = 60.0  # subtracted from `SECONDS`: imports, compiling, the last evaluation, saving


State = Literal["measured", "failed", "too long", "left out"]


@dataclass(frozen=True)
class Outcome:
    """The result of a part."""

    name: str
    question: str
    command: list[str]  # the part's template, which identifies it in a later call
    state: State
    seconds: float = 0.0
    called: list[str] = field(default_factory=list)  # the command as it was run
    why: str = ""  # a sentence, unless the part was measured
    said: str = ""  # its output
    lines: list[dict[str, Any]] | None = None  # its JSON result, also if it failed afterwards


@dataclass(frozen=True)
class Part:
    """One question, answered by a command of this checkout."""

    name: str
    question: str
    command: tuple[str, ...]  # a script and its arguments
    seconds: float  # estimate on an H100, reserved for it; its limit is twice that
    packages: tuple[str, ...] = ()  # required; else the part is left out
    files: tuple[Path, ...] = ()  # required, too
    unsupported_reason: str = ""  # why it cannot run, if known beforehand

    @property
    def uses_spare_time(self) -> bool:
        """Whether it takes an equal share of the spare time, beside `seconds`, of all such parts to come."""
        return any(SECONDS in word for word in self.command)

    def missing_requirement(self) -> str:
        """Why the part cannot run here; empty if it can."""
        if self.unsupported_reason:
            return self.unsupported_reason
        packages = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if packages:
            return f"{' and '.join(packages)} must be installed for it, but {'are' if packages[1:] else 'is'} not."
        files = [str(path) for path in self.files if not path.exists()]
        return f"{files[0]} must be there for it, but is not." if files else ""

    def fill_command(self, result: Path, limit: float) -> list[str]:
        """The command to run, which should end within `limit` seconds."""
        seconds = str(round(max(limit - STARTUP_SECONDS, 1)))
        return [word.replace(RESULT, str(result)).replace(SECONDS, seconds) for word in self.command]

    def outcome(self, state: State, **fields: Any) -> Outcome:
        return Outcome(self.name, self.question, list(self.command), state, **fields)


_DOCUMENT_TOKENS = 500


@dataclass(frozen=True)
class Text:
    """A dataset: an existing one, or Zipf-distributed tokens in `folder`, on which nothing is trained."""

    folder: Path
    dataset: Path | None = None  # its prefix; PREFIX-validation is beside it

    @property
    def prefix(self) -> Path:
        return self.dataset or self.folder / "zipf"

    @property
    def index(self) -> Path:
        """A file that exists once the dataset is complete."""
        return self.prefix.with_suffix(".idx")

    def write_zipf(self, tokens: int) -> None:
        """Writes Zipf-distributed tokens, in documents that end with 0, unless there is a dataset already."""
        if self.dataset is not None or self.index.exists():
            return
        shape = tokens // _DOCUMENT_TOKENS, _DOCUMENT_TOKENS
        documents = zipf_tokens(PYTHIA_VOCABULARY, shape, seed=0, excluded_id=0)
        documents[:, -1] = 0
        with IndexedDatasetWriter(self.prefix, vocab_size=PYTHIA_VOCABULARY) as writer:
            for document in documents:
                writer.add_document(document)


NEEDS_TEXT = "a text must be given for it by --dataset, but is not."
PREFIX, WHOLE = "train-", "whole-"  # of names of parts
TOKENS, TRAINING_MFU = 80_000_000, 0.25  # assumed, so that TOKENS fit into the seconds of a training
PLAN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("parts.yaml").read_text(encoding="utf-8"))
FULL, DRY = PLAN["full"], PLAN["dry"]


def build_parts(scale: Mapping[str, Any], text: Text, folder: Path) -> list[Part]:
    """All parts of a scale; `folder`: for runs."""
    parts: list[Part] = []
    for kind, name, options, seconds, *more_options in scale["parts"]:
        words, device = " ".join([options, *more_options]).split(), scale["device"].split()
        set_options = [option for word in words for option in ("--set", word)]
        replacements = {"{options}": words, "{set}": set_options, "{device}": device, "{where}": device[:2]}
        template, values = PLAN["kinds"][kind], {"name": name, "text": text.prefix, "folder": folder}
        values |= {"words": str(name).replace("-", " "), "result": RESULT, "seconds": SECONDS}
        command = [
            argument
            for word in template["command"].split()
            for argument in replacements.get(word) or [word.format(**values)]
        ]
        parts.append(
            Part(
                f"{kind}-{name}".removesuffix("-"),
                template["question"].format(**values),
                tuple(word for word in command if word not in replacements),
                scale["slower"] * seconds,
                tuple(template.get("packages", ())),
                (text.index,) if template.get("reads") else (),
                NEEDS_TEXT if kind == "train" and text.dataset is None else "",
            )
        )
    return parts
