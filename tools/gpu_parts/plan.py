"""The parts of tools/gpu_report.py in the order of what they are worth, in full for a GPU, and tiny for a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.command import PYTHIA_VOCABULARY, zipf_tokens
from megahead.data.writer import IndexedDatasetWriter

RESULT, SECONDS = "{result}", "{seconds}"  # in a part's command: the JSON file it is to write, and how long it may work
START_UP = 60.0  # Seconds of a part with `SECONDS` that are not work: imports, compiling, the last evaluation, saving


State = Literal["measured", "failed", "too long", "left out"]


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    name: str
    question: str
    command: list[str]  # the part's, by which it is known again
    state: State
    seconds: float = 0.0
    called: list[str] = field(default_factory=list)  # the command as it was run
    why: str = ""  # in a sentence, unless it was measured
    said: str = ""  # what it printed
    lines: list[dict[str, Any]] | None = None  # what it wrote, also if it failed afterwards


@dataclass(frozen=True)
class Part:
    """One question, answered by a command of this checkout."""

    name: str
    question: str
    command: tuple[str, ...]  # a script and its arguments
    seconds: float  # about what it takes on an H100, and at least what is kept for it. Twice that is its limit.
    packages: tuple[str, ...] = ()  # without these it is left out
    files: tuple[Path, ...] = ()  # likewise
    unsupported_reason: str = ""  # why it cannot be done, as far as that is known beforehand
    explains: str = ""  # the part whose missed targets it explains; it is left out where they were met

    @property
    def shares(self) -> bool:
        """Whether it takes as long as it is given: what is kept for it, and an equal share of what nothing needs, of
        all such parts to come."""
        return any(SECONDS in word for word in self.command)

    def lacks(self) -> str:
        """Why it cannot be done here; empty where it can."""
        if self.unsupported_reason:
            return self.unsupported_reason
        packages = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if packages:
            return f"{' and '.join(packages)} must be installed for it, but {'are' if packages[1:] else 'is'} not."
        files = [str(path) for path in self.files if not path.exists()]
        return f"{files[0]} must be there for it, but is not." if files else ""

    def filled(self, result: Path, limit: float) -> list[str]:
        """Its command, to end by itself within `limit` seconds."""
        seconds = str(round(max(limit - START_UP, 1)))
        return [word.replace(RESULT, str(result)).replace(SECONDS, seconds) for word in self.command]

    def outcome(self, state: State, **found: Any) -> Outcome:
        return Outcome(self.name, self.question, list(self.command), state, **found)


_DOCUMENT = 500


@dataclass(frozen=True)
class Text:
    """A dataset: one that is there, or in `folder`, made by a part of its own where `sources` and a tokenizer are
    given."""

    folder: Path
    sources: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    dataset: Path | None = None  # its prefix; PREFIX-validation is beside it

    @property
    def is_made(self) -> bool:
        """Whether a part makes it."""
        return self.dataset is None and bool(self.sources) and self.tokenizer is not None

    @property
    def given(self) -> bool:
        return self.dataset is not None or self.is_made

    @property
    def prefix(self) -> Path:
        return self.dataset or self.folder / ("text" if self.given else "zipf")

    @property
    def index(self) -> Path:
        """Exists once the dataset is whole."""
        return self.prefix.with_suffix(".idx")

    def why_not_trained(self) -> str:
        return "" if self.given else "a text must be given for it, by --dataset, or --text and --tokenizer, but is not."

    def settings(self) -> tuple[str, ...]:
        """Of a run that reads it."""
        validation = f"{self.prefix}-validation" if self.given else "null"
        tokenizer = self.tokenizer or "null"
        return f"data.train={self.prefix}", f"data.validation={validation}", f"data.tokenizer={tokenizer}"

    def draw(self, tokens: int) -> None:
        """So many tokens by Zipf's law, in documents that end with 0, unless a text was given or they are there."""
        if self.given or self.index.exists():
            return
        documents = zipf_tokens(PYTHIA_VOCABULARY, (tokens // _DOCUMENT, _DOCUMENT), seed=0, excluded_id=0)
        documents[:, -1] = 0
        with IndexedDatasetWriter(self.prefix, vocab_size=PYTHIA_VOCABULARY) as writer:
            for document in documents:
                writer.add_document(document)


PREFIX = "train-"
TOKENS = 100_000_000
SHARES = {"14m": 0.10, "70m": 0.25}  # of the peak, assumed of trainings so that TOKENS fit into what is kept for them
PLAN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("parts.yaml").read_text(encoding="utf-8"))
FULL, DRY = PLAN["full"], PLAN["dry"]


def parts_of(scale: Mapping[str, Any], text: Text, folder: Path) -> list[Part]:
    """All of them; `folder`: where runs go."""
    parts: list[Part] = []
    for kind, name, options, seconds, *more in scale["parts"]:
        if kind == "text" and not text.is_made:
            continue
        words, device = " ".join([options, *more]).split(), scale["device"].split()
        lists = {"{options}": words, "{set}": _set(words), "{device}": device, "{where}": device[:2]}
        lists |= {"{data}": _set(text.settings()), "{sources}": [str(path) for path in text.sources]}
        what, values = PLAN["kinds"][kind], {"name": name, "text": text.prefix, "folder": folder}
        values |= {"tokenizer": text.tokenizer}
        values |= {"words": str(name).replace("-", " "), "result": RESULT, "seconds": SECONDS}
        command = [one for word in what["command"].split() for one in lists.get(word) or [word.format(**values)]]
        parts.append(
            Part(
                f"{kind}-{name}".removesuffix("-"),
                what["question"].format(**values),
                tuple(word for word in command if word not in lists),
                scale["slower"] * seconds,
                tuple(what.get("packages", ())),
                (text.index,) if what.get("reads") else (),
                text.why_not_trained() if kind == "train" else "",
                what.get("explains", "").format(**values),
            )
        )
    return parts


def _set(settings: Iterable[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]
