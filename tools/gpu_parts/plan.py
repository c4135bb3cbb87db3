"""The parts of tools/gpu_report.py in the order of what they are worth, in full for a GPU, and tiny for a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megahead.data.writer import IndexedDatasetWriter

RESULT, SECONDS = "{result}", "{seconds}"  # in a part's command: the JSON file it is to write, and how long it may work
START_UP = 60.0  # Seconds of a part with `SECONDS` that are not work: imports, compiling, the last evaluation, saving


@dataclass(frozen=True)
class Part:
    """One question, answered by a command of this checkout."""

    name: str

    question: str

    command: tuple[str, ...]  # A script and its arguments
    seconds: float  # about what it takes on an H100, and at least what is kept for it. Twice that is its limit.
    packages: tuple[str, ...] = ()  # without these it is left out
    files: tuple[Path, ...] = ()  # likewise
    obstacle: str = ""  # why it cannot be done, as far as that is known beforehand
    # The part whose targets it tells the reason of, where they were missed; it is left out where they were met
    explains: str = ""

    @property
    def shares(self) -> bool:
        """Whether it takes as long as it is given: what is kept for it, and an equal share of what nothing needs, of
        all such parts to come."""
        return any(SECONDS in word for word in self.command)

    def lacks(self) -> str:
        """Why it cannot be done here; empty where it can."""
        if self.obstacle:
            return self.obstacle
        packages = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if packages:
            return f"{' and '.join(packages)} must be installed for it, but {'are' if packages[1:] else 'is'} not."
        files = [str(path) for path in self.files if not path.exists()]
        return f"{files[0]} must be there for it, but is not." if files else ""

    def filled(self, result: Path, limit: float) -> list[str]:
        """Its command, to end by itself within `limit` seconds."""
        values = {RESULT: str(result), SECONDS: str(round(max(limit - START_UP, 1)))}
        words = []
        for word in self.command:
            for name, value in values.items():
                word = word.replace(name, value)
            words.append(word)
        return words


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    name: str
    question: str
    command: list[str]  # the part's, by which it is known again
    state: Literal["measured", "failed", "too long", "left out"]
    seconds: float = 0.0
    called: list[str] = field(default_factory=list)  # the command as it was run
    why: str = ""  # in a sentence, unless it was measured
    said: str = ""  # what it printed
    lines: list[dict[str, Any]] | None = None  # what it wrote, also if it failed afterwards

    @staticmethod
    def left_out(part: Part, why: str) -> Outcome:
        return Outcome(part.name, part.question, list(part.command), "left out", why=why)

    @staticmethod
    def read(record: Mapping[str, Any]) -> Outcome:
        """The inverse of `vars`."""
        return Outcome(**record)


VOCABULARY = 50277
_DOCUMENT = 500


@dataclass(frozen=True)
class Text:
    """A dataset: one that is there, or in `folder`, made by a part of its own where `sources` and a tokenizer are
    given."""

    folder: Path
    sources: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    dataset: Path | None = None  # its prefix, which tools/gpu_text.py made

    @property
    def given(self) -> bool:
        return self.dataset is not None or (bool(self.sources) and self.tokenizer is not None)

    @property
    def prefix(self) -> Path:
        return self.dataset or self.folder / ("text" if self.given else "zipf")

    @property
    def index(self) -> Path:
        """Exists once the dataset is whole."""
        return self.prefix.with_suffix(".idx")

    def parts(self) -> list[Part]:
        """What makes it, if a text was given."""
        if not self.given or self.dataset is not None:
            return []
        sources = [str(path) for path in self.sources]
        command = ("tools/preprocess.py", "--input", *sources, "--tokenizer", str(self.tokenizer))
        options = ("--output", str(self.prefix), "--holdout", "200")
        return [Part("text", "How fast is a text turned into tokens?", (*command, *options), 40)]

    def obstacle_to_training(self) -> str:
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
        weights = 1 / (np.arange(VOCABULARY) + 2.7)
        weights[0] = 0.0
        drawn = np.random.default_rng(0).choice(VOCABULARY, (tokens // _DOCUMENT, _DOCUMENT), p=weights / weights.sum())
        drawn[:, -1] = 0
        with IndexedDatasetWriter(self.prefix, vocab_size=VOCABULARY) as writer:
            for document in drawn:
                writer.add_document(document)


DEEPSPEED = ("deepspeed",)


PREFIX = "train-"
TOKENS = 100_000_000
# Of the peak, which is assumed of trainings so that TOKENS fit into what is kept for them
SHARES = {"14m": 0.10, "70m": 0.25}


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: tuple[str, ...]  # options of benchmarks
    losses: str
    steps: dict[str, str]  # from the name of a part to its options
    engine: str
    waits: tuple[int, ...]  # ZeRO stages
    largest: dict[str, str]
    # From the name of a step's part, without its `step-`, to settings of the config that is profiled
    profiled: dict[str, str]
    trainings: dict[str, str]  # from a size to its settings
    kept: dict[str, float]  # Seconds of each training: its start, and TOKENS at the share of an H100 that SHARES has
    slower: float = 1.0  # parts take so many times as long as on an H100: imports on a busy CPU do


FULL = Scale(
    device=("--device", "cuda", "--precision", "bf16"),
    losses="--sizes 4096,16384,65536 --hidden 512,1024,2048 --rounds 5",
    steps={
        "70m": "--preset pythia-70m --micro-batch 8 --sequence-length 2048 --steps 20 --compile",
        "410m": "--preset pythia-410m --micro-batch 8 --sequence-length 2048 --steps 20 --compile",
        "160m": "--preset pythia-160m --micro-batch 8 --sequence-length 2048 --steps 20 --compile",
        "bert-base-512": "--preset bert-base --micro-batch 32 --sequence-length 512 --steps 20 --compile",
        "bert-base-128": "--preset bert-base --micro-batch 64 --sequence-length 128 --steps 20 --compile",
    },
    engine="--preset pythia-70m --sequence-length 2048 --rounds 20",
    waits=(1, 0, 3),
    largest={
        "70m": "--preset pythia-70m --sequence-length 2048 --largest 512",
        "410m": "--preset pythia-410m --sequence-length 2048 --largest 256",
    },
    trainings={
        "14m": "model.size=pythia-14m batch.micro_size=32",
        "70m": "model.size=pythia-70m batch.micro_size=32",
    },
    kept={"14m-headless": 100, "14m-vanilla": 120, "70m-headless": 140, "70m-vanilla": 190},
    profiled={"70m": "model.size=pythia-70m batch.micro_size=8", "410m": "model.size=pythia-410m batch.micro_size=8"},
)

_SMALL = "--set model.num_layers=1 --set model.hidden_size=32 --set model.vocab_size=512 --steps 1 --threads 1"
DRY = Scale(
    device=("--device", "cpu", "--precision", "fp32"),
    slower=5.0,
    losses="--sizes 64 --hidden 8 --rounds 1",
    steps={
        "decoder": f"--preset pythia-14m --micro-batch 1 --sequence-length 16 {_SMALL}",
        "encoder": f"--preset bert-tiny --micro-batch 1 --sequence-length 16 {_SMALL}",
    },
    engine="--preset pythia-14m --rows 1 --sequence-length 8 --stages 1 --rounds 1",
    waits=(1,),
    largest={"decoder": f"--preset pythia-14m --micro-batch 1 --sequence-length 8 --largest 2 {_SMALL}"},
    trainings={
        "tiny": "model.size=pythia-14m model.num_layers=1 model.hidden_size=32 model.num_heads=2 engine.precision=fp32 "
        "data.sequence_length=16 batch.global_size=2 batch.micro_size=2 training.steps=4 training.evaluate_every=2 "
        "training.evaluate_samples=2 schedule.warmup_steps=1"
    },
    kept={"tiny-headless": 150, "tiny-vanilla": 150},
    profiled={
        "decoder": "model.num_layers=1 model.hidden_size=32 model.num_heads=2 data.sequence_length=16 "
        "batch.micro_size=2 batch.global_size=2 engine.precision=fp32"
    },
)


def parts_of(scale: Scale, text: Text, folder: Path) -> list[Part]:
    """All of them; `folder`: where runs go."""
    report = ("--output", RESULT)
    losses = ("tools/bench_loss.py", *scale.losses.split(), *scale.device, *report)
    engine = ("tools/bench_engine.py", *scale.engine.split(), *scale.device, *report)
    first, *others = scale.waits
    steps = [_step(name, options, scale) for name, options in scale.steps.items()]
    parts = [
        Part("loss", "What does the loss cost, beside other people's kernels?", losses, 120),
        *steps[:2],
        Part("engine", "What does DeepSpeed cost beside a bare loop?", engine, 75, DEEPSPEED),
        *text.parts(),
        _waits(first, text, scale),
        *(_profile(name, settings, text, scale, folder) for name, settings in scale.profiled.items()),
        *(
            _training(size, objective, settings, scale, text, folder)
            for size, settings in scale.trainings.items()
            for objective in ("headless", "vanilla")
        ),
        *steps[2:],
        *(_waits(stage, text, scale) for stage in others),
        *(_largest(name, options, scale) for name, options in scale.largest.items()),
    ]
    return [replace(part, seconds=scale.slower * part.seconds) for part in parts]


def _step(name: str, options: str, scale: Scale) -> Part:
    command = ("tools/bench_step.py", *options.split(), *scale.device, "--output", RESULT)
    return Part(f"step-{name}", "How long is a step, headless and vanilla?", command, 65)


def _largest(name: str, options: str, scale: Scale) -> Part:
    command = ("tools/bench_step.py", *options.split(), *scale.device, "--output", RESULT)
    return Part(f"largest-{name}", "How large can a micro-batch be?", command, 60)


def _waits(stage: int, text: Text, scale: Scale) -> Part:
    settings = [f"data.train={text.prefix}", "data.validation=null", "data.tokenizer=null"]
    settings += ["batch.global_size=16", f"engine.deepspeed=configs/deepspeed/zero{stage}.json"]
    command = ("tools/count_waits.py", "--config", "configs/pythia-70m-headless.yaml", *_set(settings))
    question = f"Where does the host wait for the device at ZeRO {stage}?"
    return Part(f"waits-{stage}", question, (*command, "--output", RESULT), 35, DEEPSPEED, (text.index,))


def _profile(name: str, settings: str, text: Text, scale: Scale, folder: Path) -> Part:
    """Of a step that takes longer than it should."""
    about = [f"data.train={text.prefix}", "data.validation=null", "data.tokenizer=null", *settings.split()]
    command = ("tools/profile_step.py", "--config", "configs/pythia-70m-headless.yaml", *_set(about))
    options = (*scale.device[:2], "--output", str(folder / f"profile-{name}-trace.json.gz"))
    question = f"What takes the time of a headless {name} step?"
    return Part(f"profile-{name}", question, (*command, *options), 30, files=(text.index,), explains=f"step-{name}")


def _training(size: str, objective: str, settings: str, scale: Scale, text: Text, folder: Path) -> Part:
    """At a constant rate, so that the run may be compared at any time."""
    name = f"{PREFIX}{size}-{objective}"
    course = ["schedule.name=constant", "schedule.warmup_steps=100", "batch.global_size=64", "training.steps=1600"]
    course += ["training.evaluate_every=50", "training.evaluate_samples=64", "training.checkpoint_every=100000"]
    course += [f"training.max_seconds={SECONDS}", f"objective.name={objective}", *text.settings(), *settings.split()]
    course += [f"name={name}", f"output_dir={folder / 'runs' / name}"]
    command = ("launch/pretrain.py", "--config", "configs/pythia-70m-headless.yaml", *_set(course))
    question = f"How well does {size} {objective} learn, per token and per second?"
    kept = scale.kept[f"{size}-{objective}"]
    return Part(name, question, command, kept, DEEPSPEED, (text.index,), text.obstacle_to_training())


def _set(settings: Iterable[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]
