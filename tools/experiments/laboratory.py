"""Several commands of experiments may share a folder: what two of them need, one makes while the other waits.

What every experiment needs: runs of the normal command, each done once, and a record of what came out.
"""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from demo_pipeline.pipeline import environment, launcher
from experiments.charts import Chart, save_charts
from megahead.checkpoints.folders import find_checkpoint
from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from megahead.data.tokenizer import load_tokenizer
from megahead.data.vocabulary_map import SpelledVocabulary
from megahead.distributed.group import Group
from megahead.distributed.launch import choose_device
from megahead.errors import FieldError, UserError
from megahead.report.read import RunMetrics, read_metrics
from megahead.report.tables import to_markdown, to_rich
from megahead.run_folder import RunFolder
from megahead.train.run import settle_precision


@contextmanager
def one_at_a_time(output: Path) -> Iterator[None]:
    """Waits until no other process makes `output`, at the longest until that process ends."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_name(f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


ROOT = Path(__file__).resolve().parents[2]
PROCESSORS = "processors.txt"  # in a run's folder: a line for each session


@dataclass(frozen=True)
class Laboratory:
    """Trains named runs on `text` in `folder`; the overrides `settings` have the last word in all of them."""

    folder: Path
    text: Path | None
    settings: Sequence[str]
    console: Console
    vocabulary: int = 8_192
    # Files of the harness's tasks, as tools/eval_harness.py takes them; what needs them is left out without
    tasks_data: Path | None = None
    tokenizer: Path | None = None  # another tokenizer.json, where an experiment changes to one
    held_out: int = 50  # one in so many documents is kept for evaluation
    ranks: int = 1  # of each run: two of a thread are faster than one of two threads where a step is short
    # What each run was: its seed, tokens, seconds and settings
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def data(self, vocabulary: int | None = None) -> list[str]:
        """The settings that name the text in so many ids of byte-level BPE; made where it is missing."""
        size = vocabulary or self.vocabulary
        return [*self._indexed(f"bpe-{size}", size, [], []), f"model.vocab_size={size}"]

    def encoder_data(self, vocabulary: int | None = None) -> list[str]:
        """The same in WordPiece, with the ids that masking needs."""
        size = vocabulary or self.vocabulary
        words = f"wordpiece-{size}"
        settings = self._indexed(words, size, ["--type", "wordpiece", "--encoder"], ["--end-token", "[SEP]"])
        tokenizer = load_tokenizer(self.folder.parent / words / "tokenizer.json")
        ids = {f"masking.{name}_token": tokenizer.id_of(f"[{name.upper()}]") for name in ("cls", "sep", "mask")}
        ids |= {"data.end_token": ids["masking.sep_token"], "model.vocab_size": tokenizer.vocab_size}
        return [*settings, *(f"{name}={value}" for name, value in ids.items()), "masking.special_tokens=[]"]

    def data_in(self, tokenizer: Path) -> list[str]:
        """The settings that name the text in the ids of a tokenizer that is there."""
        spelled = SpelledVocabulary.open(tokenizer)
        end = spelled.in_role("end")
        if end is None:
            raise FieldError("--tokenizer", "have a special token that ends a text", got=str(tokenizer))
        ends = ["--end-token", spelled.spellings[end] or ""]
        settings = self._cut(f"of-{tokenizer.stem}", tokenizer, ends)
        return [*settings, f"data.end_token={end}", f"model.vocab_size={len(spelled.spellings)}"]

    def given_text(self) -> Path:
        """What --text names. UserError when it is missing."""
        if self.text is None:
            raise FieldError("--text", "name what this experiment reads", got="missing")
        return self.text

    def _indexed(self, name: str, size: int, kind: Sequence[str], ends: Sequence[str]) -> list[str]:
        tokenizer = self.folder.parent / name / "tokenizer.json"
        vocabulary = [*kind, "--vocab-size", str(size), "--output", str(tokenizer)]
        self.make(tokenizer, "train_tokenizer.py", "--input", str(self.given_text()), *vocabulary)
        return self._cut(name, tokenizer, ends)

    def _cut(self, name: str, tokenizer: Path, ends: Sequence[str]) -> list[str]:
        dataset = self.folder.parent / name / "text"
        index = [*ends, "--tokenizer", str(tokenizer), "--output", str(dataset), "--holdout", str(self.held_out)]
        self.make(dataset.with_suffix(".idx"), "preprocess.py", "--input", str(self.given_text()), *index)
        return [f"data.train={dataset}", f"data.validation={dataset}-validation", f"data.tokenizer={tokenizer}"]

    def train(self, config: str, name: str, *overrides: str, fork: Path | None = None) -> RunMetrics:
        """`configs/CONFIG.yaml` trained to its end in `folder/NAME`, or read when it already was; a new run goes on
        from the checkpoint `fork`.

        Raises UserError with the end of its log when it fails, and when it was stopped before.
        """
        run, source = self.folder / name, f"configs/{config}.yaml"
        given = [*overrides, *self.settings, f"output_dir={run}", f"name={run.name}"]
        wanted = load_config(source, given)
        with one_at_a_time(run):
            if not _finished(run, wanted):
                run.mkdir(parents=True, exist_ok=True)
                with (run / PROCESSORS).open("a") as sessions:
                    sessions.write(_processor() + "\n")
                command = ["launch/pretrain.py", "--config", source]
                command += [part for override in given for part in ("--set", override)]
                if fork is not None and find_checkpoint(run) is None:
                    command += ["--resume", str(fork)]
                self._do(f"training {name}", command, run / "log.txt", self.ranks)
            if not _finished(run, wanted):  # a run that is told to stop saves, and ends without an error
                raise UserError(f"training {name} must reach its last step, but was stopped; call again to go on.")
        metrics = read_metrics(run)
        last = metrics.training[-1]
        self.runs[name] = {"seed": wanted.seed, "tokens": last["tokens"], "seconds": last["seconds"]}
        self.runs[name]["config"] = wanted.model_dump(mode="json")
        self.console.print(f"{name}: perplexity {metrics.validation[-1]['perplexity']:,.1f}", soft_wrap=True)
        return metrics

    def processors(self, name: str) -> str:
        """Those on which sessions of a run began; empty where it was trained before this was written down."""
        sessions = self.folder / name / PROCESSORS
        return ", ".join(dict.fromkeys(sessions.read_text().splitlines())) if sessions.exists() else ""

    def run(self, tool: str, *arguments: str) -> None:
        """Runs tools/TOOL, whose output goes to `folder`/TOOL.log. UserError when it fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._do(f"running {tool}", [f"tools/{tool}", *arguments], self.folder / f"{tool}.log")

    def make(self, output: Path, tool: str, *arguments: str) -> None:
        """Runs tools/TOOL unless `output`, which it writes whole or not at all, is there. UserError when it fails."""
        with one_at_a_time(output):
            if not output.exists():
                command = [f"tools/{tool}", *arguments]
                self._do(f"making {output.name}", command, output.with_name(f"{output.name}.log"))

    def _do(self, what: str, command: Sequence[str], log: Path, ranks: int = 1) -> None:
        with self.console.status(what), log.open("a") as output:
            code = run_python(command, output, ranks)
        if code:
            last = "\n".join(log.read_text().splitlines()[-15:])
            raise UserError(f"{what} must come to its end, but failed; its last lines:\n{last}")

    def record(self, name: str, rows: Sequence[dict[str, Any]], *charts: Chart) -> None:
        """Prints the rows; `folder` gets NAME.json with how they were made, NAME.md as a table, NAME.png as charts."""
        made = {
            "command": [Path(sys.executable).name, *sys.argv],
            "commit": _commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
            "settings": list(self.settings),
            "runs": self.runs,
            "results": list(rows),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        (self.folder / f"{name}.md").write_text(to_markdown(rows), encoding="utf-8")
        if charts:
            save_charts(charts, self.folder / f"{name}.png")
        self.console.print(to_rich(rows))


def run_python(command: Sequence[str], output: TextIO, ranks: int = 1) -> int:
    """Exit code of `python COMMAND ...`, run where the project is, by DeepSpeed's launcher if on more than one rank."""
    launched, variables = (launcher(ranks), environment()) if ranks > 1 else ([], None)
    command = [sys.executable, *launched, *command]
    return subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=output).returncode


def _finished(run: Path, config: RunConfig) -> bool:
    """Whether the folder holds a run of just these settings that came to its end, evaluations included.

    What settings did not exist yet when it ran has its default.
    """
    folder = RunFolder(run)
    if not ended(run) or not folder.config.exists():
        return False
    device = choose_device(config.engine.device, local_rank=0)
    return load_config(folder.config) == settle_precision(config, device, Group())  # there it is told what auto came to


def ended(run: Path) -> bool:
    """Whether the last session in a run folder trained to its last step and said so."""
    try:
        return bool(json.loads(RunFolder(run).ending.read_text())["ending"] == "finished")
    except OSError:
        return False


def _processor() -> str:
    """Its name, and its fastest instructions for bf16 and fp32 where Linux tells them."""
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    except OSError:
        return platform.processor() or platform.machine()
    known = {name.strip(): value.strip() for name, value in facts.items()}
    flags = known.get("flags", "").split()
    fast = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags][:1]
    return " with ".join([known.get("model name", platform.machine()), *fast])


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
