"""Makes a generative model from a folder of text in one call: trains a tokenizer, tokenizes, trains, reports and
exports.

The model's size and the number of steps are planned from the amount of text and the speed of this machine; the plan is
written as the run's YAML. Each stage writes its result to a file, so that a second call resumes the first.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory, TemporaryFile
from time import monotonic
from typing import Any

import numpy as np
import yaml

from megahead.config.loading import config_from_dict, load_config
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.inspection import TextSurvey, describe_size, survey
from megahead.data.preprocess import END_TOKEN, end_token_id, preprocess, suitable_workers
from megahead.data.records import Selection
from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import sample_texts, save_tokenizer, train_bpe
from megahead.data.writer import IndexedDatasetWriter, ProgressBar
from megahead.errors import FieldError, UserError
from megahead.estimate import candidate_rows, run_flops, run_parameters
from megahead.files import write_atomically
from megahead.report.read import read_metrics, read_runs
from megahead.run_process import BENCHMARK_STEPS, DeadlineMonitor, measure_step_seconds, pretrain
from megahead.sharing import add_sample_and_curves
from megahead.wording import format_duration, format_si, pluralize

Report = Callable[[str], object]
Shape = tuple[int, int]

SHAPES: tuple[Shape, ...] = ((2, 128), (3, 192), (4, 256), (6, 384), (6, 512))
"""Layers and hidden size; heads have 64 features."""

TIMING_SHARE = 0.2
"""Share of the time for timing shapes. If no step ends within it, the run's own steps are timed."""

ASSUMED_FLOPS_PER_SECOND = 5e10
"""FLOPs per second of a machine that could not be measured: half of one core's."""

TOLERANCE = 0.05
"""A run that is too slow is restarted with fewer steps if that saves more than this share of the available time."""

MIN_TOKENS_PER_PARAMETER = 2
"""A larger shape is chosen only if it sees at least this many tokens per parameter of its blocks."""

MAX_EPOCHS = 16
"""Most epochs."""

BYTES_PER_TOKEN, TOKENS_PER_VOCAB_ID = 4, 100
"""A tokenizer gets one id per this many tokens (of this many bytes), so that each id occurs often enough to be
learned."""

FEW_DOCUMENTS = 200
"""With fewer documents, the end of each is held out instead of whole documents."""

MIN_TEXT_BYTES = 10_000
"""With less text, the held-out part would seldom fill a row."""

EXPORT_SECONDS = 25
"""Time reserved for the export, the report and the sample; more if starting a run takes over half of it."""

MIN_TRAINING_SECONDS = 15
"""Least training time."""

EVALUATION_ROWS, EVALUATION_SLOWNESS = 256, 2.0
"""Rows per evaluation, and its time per FLOP relative to training's, due to the softmax over the vocabulary (measured
for 2 layers of 128 and 16,384 ids: a step of 168 ms, an evaluation of 7 s)."""

MAX_EVALUATIONS, EVALUATION_SHARE = 8, 0.2
"""The largest number of evaluations in a run, and the largest share of its time that they may take."""


@dataclass(frozen=True)
class Plan:
    """What will be trained, and how long a step of it takes here."""

    shape: Shape
    vocab_size: int
    tokens: float
    """Approximate number of tokens in the text."""

    step_seconds: float
    startup_seconds: float = 0.0
    """Time from the start of a run to its first step."""

    is_measured: bool = True
    """Whether `step_seconds` was measured; if not, it is assumed."""

    @cached_property
    def config(self) -> RunConfig:
        """The config of a run of one step."""
        return config_from_dict(_settings(self.shape, self.vocab_size))

    def step_flops(self) -> float:
        return run_flops(self.config, candidate_rows(self.config)).total * self.config.tokens_per_step()

    def steps(self, available_seconds: float) -> int:
        """The number of steps that the text allows, and the time that startup, evaluations and export leave."""
        max_steps = MAX_EPOCHS * self.tokens / self.config.tokens_per_step()
        training_seconds = max(MIN_TRAINING_SECONDS, available_seconds - self.other_seconds(available_seconds))
        return max(1, math.ceil(min(training_seconds / self.step_seconds, max_steps)))

    def evaluations(self, available_seconds: float) -> int:
        """The number of evaluations that time allows, the last one after the last step."""
        run_seconds = available_seconds - self.startup_seconds - self.export_seconds()
        return min(MAX_EVALUATIONS, max(1, int(EVALUATION_SHARE * run_seconds / self._evaluation_seconds())))

    def _evaluation_seconds(self) -> float:
        flops = run_flops(self.config, self.vocab_size).total / 3 * EVALUATION_ROWS * self.config.data.sequence_length
        return EVALUATION_SLOWNESS * self.step_seconds * flops / self.step_flops()

    def other_seconds(self, available_seconds: float) -> float:
        """Time of everything after planning except the training steps."""
        evaluation_seconds = self.evaluations(available_seconds) * self._evaluation_seconds()
        return self.startup_seconds + evaluation_seconds + self.export_seconds()

    def export_seconds(self) -> float:
        """Time of everything after training."""
        return max(EXPORT_SECONDS, 2 * self.startup_seconds)

    def total_seconds(self, available_seconds: float) -> float:
        """Time of everything after planning; more than `available_seconds` if the plan does not fit."""
        return self.other_seconds(available_seconds) + self.steps(available_seconds) * self.step_seconds

    def fits(self, available_seconds: float) -> bool:
        """Whether there are time and text for MIN_TOKENS_PER_PARAMETER."""
        tokens = self.steps(available_seconds) * self.config.tokens_per_step()
        return tokens >= MIN_TOKENS_PER_PARAMETER * run_parameters(self.config).body

    def line(self, available_seconds: float) -> str:
        steps, layers = self.steps(available_seconds), pluralize(self.shape[0], "layer")
        size = format_si(run_parameters(self.config).total)
        return (
            f"headless decoder, {layers} of {self.shape[1]}, {size} parameters; {pluralize(steps, 'step')} of "
            f"{1000 * self.step_seconds:.0f} ms ({'measured' if self.is_measured else 'assumed'}), "
            f"{format_si(steps * self.config.tokens_per_step())} tokens in {format_duration(steps * self.step_seconds)}"
        )


@dataclass(frozen=True)
class QuickstartResult:
    """The paths that `start` wrote, and the model's perplexity and sample."""

    config: Path
    run: Path
    model: Path
    """A Hugging Face folder with the training-free head, or that of another objective in `run.yaml`."""

    page: Path
    perplexity: float | None
    """Perplexity on held-out text; None if the run has none."""

    sample: str


def start(
    path: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    minutes: float = 10,
    folder: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    report: Report = print,
) -> QuickstartResult | None:
    """Trains a headless decoder on the text in `path` (a file, or a folder with all that is in it) and exports it, in
    about `minutes` altogether.

    `tokenizer`: a file to take instead of training one. `folder`: the folder of all outputs (default: `NAME-headless`
    in the working directory). A second call keeps finished outputs, and the `run.yaml` there may be edited. `report`
    receives a line for each plan and result. Returns None after a `dry_run`, which ends with the plan. UserError if
    `path` contains no text, or another than that of the run in `folder`.
    """
    if not 1 <= minutes < math.inf:
        raise FieldError("--minutes", "be at least 1", got=minutes)
    folder = folder_of(Path(path), folder)
    config, text = folder / "run.yaml", f"{Path(path).resolve()} ({describe_size(Path(path), folder)})"
    if config.exists():
        _check_same_text(config, Path(path), text)
        ignored = "--minutes does not count" if tokenizer is None else "--minutes and --tokenizer do not count"
        way_on = "raise `training.steps` there, or name another --folder"
        report(f"{config} is there: the run goes on with it, and {ignored}; {way_on}")
        if dry_run:
            return None
        ending = _pretrain(config)
    else:
        tokenizer_path, deadline = None if tokenizer is None else Path(tokenizer), monotonic() + 60 * minutes
        found = _survey_text(Path(path), folder, tokenizer_path, report)
        if not dry_run:
            _require_writable(folder)
        plan = make_plan(found, tokenizer_path, 60 * minutes, report)
        if not dry_run:
            _write_datasets(found, tokenizer_path, plan, folder, report)
            plan = replace(plan, tokens=IndexedDataset(folder / "text").num_tokens)
        remaining_seconds = deadline - monotonic()
        missing_seconds = plan.total_seconds(remaining_seconds) - remaining_seconds
        if missing_seconds > plan.step_seconds:
            excess = format_duration(missing_seconds)
            report(f"{'time':<12}about {excess} more than --minutes {minutes:g}, which are too few for this machine")
        if dry_run:
            return None
        _write_config(config, plan, remaining_seconds, _HEADER + text)
        report(f"{'config':<12}{config}: change it, and `megahead pretrain --config {quote(str(config))}` runs it")
        ending = _train_until(deadline - plan.export_seconds(), config, plan, TOLERANCE * 60 * minutes, report)
    if ending == "stopped":
        report("the same command goes on from here")
        raise KeyboardInterrupt
    return _export_results(config, report)


def _pretrain(config: Path, must_stop: Callable[[], bool] | None = None) -> str:
    """Trains; returns how the run ended, `stopped` also after Ctrl-C."""
    with suppress(KeyboardInterrupt):
        pretrain(config, must_stop=must_stop)
        return str(json.loads(load_config(config).folder().session_end.read_text(encoding="utf-8"))["ending"])
    return "stopped"


def _train_until(deadline: float, config: Path, plan: Plan, tolerance: float, report: Report) -> str:
    """Trains, and returns how it ended. A run that turns out too slow for `deadline` is stopped early, gets fewer steps
    and goes on, so that its learning rate still decays to the end and evaluations keep their share of the time."""
    seconds = deadline - monotonic() + plan.export_seconds()
    while True:
        settings = load_config(config)
        run, steps = settings.folder().path, settings.training.steps
        monitor = DeadlineMonitor(run, steps, deadline, plan.startup_seconds, tolerance)
        ending = _pretrain(config, monitor.must_stop)
        if ending != "stopped" or monitor.new_steps is None:
            return ending
        report(f"{'time':<12}steps take longer than planned: {monitor.new_steps:,} instead of {steps:,}")
        header, _, content = config.read_text(encoding="utf-8").partition("\n")
        tree = yaml.safe_load(content)
        slower = replace(plan, step_seconds=monitor.step_seconds)
        tree["training"] |= _intervals(monitor.new_steps, slower.evaluations(seconds))
        _save_config(config, header, tree)


_HEADER = "# Written by `megahead start` for "


def _check_same_text(config: Path, path: Path, text: str) -> None:
    """FieldError if the run is of another text. Earlier versions recorded only the path."""
    first = config.read_text(encoding="utf-8").partition("\n")[0]
    if first.startswith(_HEADER) and first.removeprefix(_HEADER) not in (text, str(path.resolve())):
        rule, made_of = f"hold nothing that was made of another text than {text}", first.removeprefix(_HEADER)
        hint = f"name another folder, or finish that run by `megahead pretrain --config {quote(str(config))}`"
        raise FieldError("--folder", rule, got=f"{config.parent}, made of {made_of}", hint=hint)


def _survey_text(path: Path, folder: Path, tokenizer: Path | None, report: Report) -> TextSurvey:
    """Surveys the text in `path`; FieldError if it is too little or in `folder`, or if the tokenizer has no end
    token."""
    if path.exists() and (path if path.is_dir() else path.parent).resolve().is_relative_to(folder.resolve()):
        rule, hint = "be a folder without the text, since what lies there is not read", "name another folder"
        raise FieldError("--folder", rule, got=f"{folder}, which has {path}", hint=hint)
    found = survey(path, folder.absolute())
    for line in found.lines():
        report(line)
    if tokenizer is not None:  # before anything that takes long
        try:
            end_token_id(load_tokenizer(str(tokenizer)), None)
        except FieldError:
            rule = f"have the token {END_TOKEN}, which closes documents"
            hint = "add it, or take the steps one by one with `megahead preprocess --end-token`"
            raise FieldError("--tokenizer", rule, got=f"{tokenizer}, without it", hint=hint) from None
    if found.text_bytes() < MIN_TEXT_BYTES:
        rule = f"hold at least {MIN_TEXT_BYTES:,} bytes of text to learn from"
        raise FieldError("PATH", rule, got=f"{path} with {found.text_bytes():,.0f}", hint="add text")
    return found


def _require_writable(folder: Path) -> None:
    """Creates the folder; FieldError if it is not writable, before anything that takes long."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        rule, hint = "be a folder that can be written to", "name another folder"
        raise FieldError("--folder", rule, got=f"{folder} ({error.strerror})", hint=hint) from None


def folder_of(path: Path, folder: str | os.PathLike[str] | None = None) -> Path:
    """The output folder: by default named after the text, in the working directory."""
    name = path.resolve().name.split(".")[0] or "text"
    return Path(f"{name}-headless") if folder is None else Path(folder)


def make_plan(found: TextSurvey, tokenizer: Path | None, seconds: float, report: Report) -> Plan:
    """The plan with the largest shape for which `seconds` and the text suffice on this machine. Shapes are timed from
    the smallest up, each by a run of a few steps on random ids, all within TIMING_SHARE of `seconds`."""
    tokens, start_time = found.text_bytes() / BYTES_PER_TOKEN, monotonic()
    vocab_size = _vocab_size(tokens) if tokenizer is None else load_tokenizer(str(tokenizer)).vocab_size
    report(f"{'tokenizer':<12}{tokenizer or f'a byte-level BPE of at most {vocab_size:,} ids, trained on it'}")
    report(f"{'speed':<12}measuring how fast this machine trains")

    def remaining_seconds() -> float:
        return seconds - (monotonic() - start_time)

    def time_shape(shape: Shape) -> Plan | None:
        timing_start = monotonic()
        max_seconds = TIMING_SHARE * seconds - (timing_start - start_time)
        try:
            step_seconds = _measure_shape(shape, vocab_size, max_seconds)
        except TimeoutError:
            return None
        startup_seconds = max(0.0, monotonic() - timing_start - BENCHMARK_STEPS * step_seconds)
        return Plan(shape, vocab_size, tokens, step_seconds, startup_seconds)

    plan = time_shape(SHAPES[0])
    if plan is None:
        report(f"{'speed':<12}not measured: no step within {format_duration(TIMING_SHARE * seconds)}")
        plan = Plan(SHAPES[0], vocab_size, tokens, 1.0, TIMING_SHARE * seconds, is_measured=False)
        plan = replace(plan, step_seconds=plan.step_flops() / ASSUMED_FLOPS_PER_SECOND)
    for shape in SHAPES[1:]:
        larger = replace(plan, shape=shape)
        larger = replace(larger, step_seconds=plan.step_seconds * larger.step_flops() / plan.step_flops())
        timing_seconds = larger.startup_seconds + BENCHMARK_STEPS * larger.step_seconds
        if remaining_seconds() - timing_seconds < (1 - TIMING_SHARE) * seconds:
            report(f"{'speed':<12}no time to measure more than {pluralize(plan.shape[0], 'layer')} of {plan.shape[1]}")
            break
        if not larger.fits(remaining_seconds() - timing_seconds):
            break
        try:
            timed = time_shape(shape)
        except UserError as error:  # such as too little memory
            report(f"{'speed':<12}{pluralize(shape[0], 'layer')} of {shape[1]} cannot be trained here: {error}")
            break
        if timed is None or not timed.fits(remaining_seconds()):
            break
        plan = timed
    report(f"{'run':<12}{plan.line(remaining_seconds())}")
    return plan


def _vocab_size(tokens: float) -> int:
    """A power of two from 512 to 16,384."""
    return 1 << min(14, max(9, int(math.log2(max(tokens, 1) / TOKENS_PER_VOCAB_ID))))


def _settings(shape: Shape, vocab_size: int) -> dict[str, Any]:
    """Settings of a run of one step: the demo's, tuned by a search (docs/research/recipe.md), in another shape."""
    settings: dict[str, Any] = load_config("demo-headless").model_dump(mode="json", exclude_unset=True)
    layers, hidden = shape
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": hidden // 64, "vocab_size": vocab_size}
    settings["model"] |= sizes
    settings["batch"]["micro_size"] = settings["batch"]["global_size"]
    settings["data"] = {"train": "text", "sequence_length": settings["data"]["sequence_length"]}
    settings["schedule"]["warmup_steps"] = 0
    return settings | {"name": "run", "output_dir": "run", "training": {"steps": 1}}


def _measure_shape(shape: Shape, vocab_size: int, max_seconds: float) -> float:
    """The step time of a run of `shape` on random ids with Zipf frequencies, 1 / (i + 2). TimeoutError if no step ends
    within `max_seconds`."""
    with TemporaryDirectory() as name:
        dataset, weights = Path(name) / "text", 1 / np.arange(2, vocab_size + 1)
        ids = 1 + np.random.default_rng(0).choice(vocab_size - 1, (400, 256), p=weights / weights.sum())
        with IndexedDatasetWriter(dataset, vocab_size=vocab_size) as writer:
            for document in ids.tolist():
                writer.add_document([*document, 0])
        settings = _settings(shape, vocab_size)
        settings["data"]["train"] = str(dataset)
        return measure_step_seconds(settings, max_seconds=max_seconds)


def make_tokenizer(
    paths: Sequence[Path], selection: Selection, vocab_size: int, output: Path, *, max_bytes: int = 20_000_000
) -> None:
    """Trains a byte-level BPE on at most `max_bytes` of the text in `paths`, and saves it; broken records are left
    out."""
    with ProgressBar("Reading") as bar:
        texts = sample_texts(paths, selection=selection, max_bytes=max_bytes, skip_broken=True, progress=bar)
        save_tokenizer(train_bpe(texts, vocab_size), output)


def _write_datasets(found: TextSurvey, tokenizer: Path | None, plan: Plan, folder: Path, report: Report) -> None:
    """Writes the tokenizer and the datasets, replacing existing ones (a killed start may have read another text).
    Where what is held out does not fill a row, it is a fifth; FieldError if that does not."""
    paths, selection = [item.path for item in found.inputs], found.selection()
    chosen = tokenizer or folder / "tokenizer.json"
    if tokenizer is None:
        make_tokenizer(paths, selection, plan.vocab_size, chosen)
    few = found.has_fewer_documents(FEW_DOCUMENTS)
    shares: list[dict[str, Any]] = [{"holdout": 50}, {"holdout": 5}]
    if few:
        shares = [{"holdout_tail": Fraction(1, 20)}, {"holdout_tail": Fraction(1, 5)}]
    workers = suitable_workers(found.bytes, os.cpu_count() or 1)
    row_tokens = plan.config.data.sequence_length + 1
    for held_out in shares:
        with ProgressBar("Tokenizing") as bar:
            done = preprocess(
                paths, chosen, folder / "text", selection=selection, on_error="skip", source=found.name,
                workers=workers, progress=bar, **held_out,
            )  # fmt: skip
        held_out_tokens = IndexedDataset(folder / "text-validation").num_tokens
        if held_out_tokens >= row_tokens:
            break
    else:
        rule = f"have {row_tokens:,} tokens in the fifth that is held out"
        raise FieldError("PATH", rule, got=f"{found.name} with {held_out_tokens:,}", hint="add text")
    left_out = f", {pluralize(done.broken, 'broken record')} left out" if done.broken else ""
    documents, held_out_text = done.documents, f"{done.held_out:,}"
    if share := held_out.get("holdout_tail"):  # the ends are documents of their own
        documents, held_out_text = documents - done.held_out, f"the last {100 * share} % of each"
    report(
        f"{'ids':<12}{pluralize(documents, 'document')}, {held_out_text} held out, "
        f"{pluralize(done.tokens, 'token')}{left_out}"
    )


def _write_config(path: Path, plan: Plan, seconds: float, header: str) -> None:
    """Writes the run's YAML without settings that the datasets provide. Paths in it are absolute, so that it can be
    read from any folder."""
    folder, steps, settings = path.parent.absolute(), plan.steps(seconds), _settings(plan.shape, plan.vocab_size)
    del settings["model"]["vocab_size"]
    settings["name"] = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.resolve().name).strip("-") or "run"
    settings["output_dir"] = str(folder / "run")
    settings["data"] |= {"train": str(folder / "text"), "validation": str(folder / "text-validation")}
    settings["schedule"]["warmup_steps"] = round(min(0.1, 50 / steps), 4)
    settings["training"] = _intervals(steps, plan.evaluations(seconds)) | {"evaluate_samples": EVALUATION_ROWS}
    _save_config(path, header, settings)


def _intervals(steps: int, evaluations: int) -> dict[str, int]:
    """Settings of `training`: the last evaluation is after the last step."""
    every = math.ceil(steps / evaluations)
    return {"steps": steps, "evaluate_every": every, "checkpoint_every": 2 * every}


def _save_config(path: Path, header: str, settings: Mapping[str, Any]) -> None:
    content = yaml.safe_dump(dict(settings), sort_keys=False, default_flow_style=None)
    write_atomically(path, f"{header}\n{content}")


def _export_results(config: Path, report: Report) -> QuickstartResult:
    """Exports the run, samples text, and makes its report."""
    from megahead.hf.card import CardMetadata
    from megahead.hf.export import export
    from megahead.hf.heads import best_head
    from megahead.hf.trained import TrainedModel
    from megahead.report.page import render_page

    run, model = load_config(config).folder(), config.parent / "model"
    export(run.path, model, best_head(TrainedModel.open(run.path)), card=CardMetadata(str(model)))
    text = add_sample_and_curves(model, run.path) or ""
    write_atomically(run.samples, json.dumps({"prompt": "", "text": text}, ensure_ascii=False) + "\n")
    page = config.parent / "report.html"
    write_atomically(page, render_page(read_runs([run.path])))
    evaluations = read_metrics(run.path).validation
    perplexity = evaluations[-1]["perplexity"] if evaluations else None
    report(f"{'it writes':<12}{' '.join(text.split())}")
    if perplexity is not None:
        report(f"{'perplexity':<12}{perplexity:,.1f} on held-out text")
    report(f"{'report':<12}{page}")
    report(f"{'model':<12}{model}: megahead generate --model {quote(str(model))} --interactive")
    return QuickstartResult(config, run.path, model, page, perplexity, text)
