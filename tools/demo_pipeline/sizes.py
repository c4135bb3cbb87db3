"""The demo's sizes and decoders, and the settings that make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megahead.errors import FieldError

# The decoders of the demo, by the settings that make them; all have as many blocks, as wide
MODELS: Mapping[str, Sequence[str]] = {"pythia": (), "llama": ("model.family=llama", "model.activation=silu")}


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the demo; a setting is `a.b=c` over `configs/demo-NAME.yaml`."""

    name: str
    folder: str  # where it lies, beside the checkout's other folders
    # Of the installed source files whose documentation is read, drawn by hash; None: every file
    source_bytes: int | None = None
    held_out: float = 0.04  # share of these files that no model learns from
    tokenizer_bytes: int = 20_000_000  # of text that the tokenizer is made from
    settings: Sequence[str] = ()  # of every run
    settings_of: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of one run, by its name

    def of(self, model: str) -> Size:
        """The same for another of `MODELS`, in a folder of its own."""
        if not MODELS[model]:
            return self
        settings = [*self.settings, *MODELS[model]]
        return replace(self, name=f"{self.name} {model}", folder=f"{self.folder}-{model}", settings=settings)

    def claim(self, folder: Path) -> None:
        """Keeps `folder` for demos of this size: FieldError where one of another size lies."""
        mark, stages = folder / "size.txt", folder / "stages"
        unmarked = FULL.name if stages.exists() else self.name
        lying = mark.read_text(encoding="utf-8").strip() if mark.exists() else unmarked
        if lying != self.name:
            rule = f"hold no demo but a {self.name} one"
            raise FieldError("--folder", rule, got=f"{folder} with a {lying} one", hint="name another, or none")
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(self.name + "\n", encoding="utf-8")


_FEW_STEPS = ("training.steps=160", "schedule.warmup_steps=20", "training.checkpoint_every=80")

FULL = Size(name="full", folder="demo")

# The same model as in full, on a sixth of the text
QUICK = Size(
    name="quick",
    folder="demo-quick",
    source_bytes=40_000_000,
    held_out=0.15,
    tokenizer_bytes=5_000_000,
    settings=["training.evaluate_samples=128"],
    settings_of={
        "headless": [*_FEW_STEPS, "training.evaluate_every=40"],
        "vanilla": _FEW_STEPS,
        "head": ["training.steps=40", "training.evaluate_every=20"],
    },
)
