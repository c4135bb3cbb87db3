"""`megahead start`: from a folder of any text to a model, its report and its run, which goes on by itself."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megahead import quickstart, run_process
from megahead.config.loading import load_config
from megahead.data.indexed import IndexedDataset
from megahead.data.inspection import survey
from megahead.data.tokenizer import load_tokenizer
from megahead.data.train_tokenizer import save_tokenizer, train_bpe
from megahead.errors import DataError, FieldError, UserError
from megahead.quickstart import SHAPES, Plan, QuickstartResult, _write_datasets, folder_of, start
from megahead.run_process import pretrain
from support.commands import config_file
from support.forked import fork_pythons

TEXTS = [text for text in topics.values() if len(text) > 800]
"""Chapters of Python's reference, which every installation has."""


def mixed(folder: Path, number: int = 6) -> Path:
    """The same chapters in each kind of file, and what is no text."""
    texts = TEXTS[:number]
    (folder / "deep/deeper").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden/no.txt").write_text("not this")
    (folder / "notes.md").write_text(texts[0])
    (folder / "deep/plain.txt").write_text(texts[1])
    (folder / "deep/lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[2:4]))
    (folder / "deep/array.json").write_text(json.dumps([{"title": "t", "body": text} for text in texts[4:]]))
    with (folder / "deep/deeper/table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "content"], *([k, text] for k, text in enumerate(texts))])
    (folder / "photo.jpg").write_bytes(b"\xff\xd8")
    (folder / "deep/broken.json").write_text("{oops")
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small model, few steps to measure a machine by, a text that is read twice, no interpreter that starts anew."""
    monkeypatch.setattr(quickstart, "SHAPES", ((1, 64),))
    for module in (quickstart, run_process):
        monkeypatch.setattr(module, "BENCHMARK_STEPS", 2)
    monkeypatch.setattr(quickstart, "MAX_EPOCHS", 2)
    fork_pythons(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(told: list[str], path: Path, **options: Any) -> QuickstartResult:
    result = start(path, report=told.append, **options)
    assert result is not None
    return result


def test_a_folder_becomes_a_model_and_a_second_call_goes_on_from_another_folder(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed(quick / "texts")
    told = list[str]()
    made = started(told, quick / "texts")
    assert made.config == Path("texts-headless/run.yaml")
    said = "\n".join(told)
    assert "1 .csv file" in said
    assert "`content` or `body` or `text`" in said or "`content`" in said
    assert "photo.jpg does not end in" in said
    assert "broken.json has no text" in said
    config = load_config(made.config)
    assert config.objective.name == "headless"
    card = (made.model / "README.md").read_text()
    assert "| Data | texts, " in card
    assert "\n# texts-headless\n" in card
    assert 'from_pretrained("texts-headless/model")' in card
    assert 1 < made.perplexity < config.model.vocab_size
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made.model), AutoTokenizer.from_pretrained(made.model)
    assert model.config.vocab_size == len(tokenizer)
    assert made.sample in json.loads((made.run / "samples.jsonl").read_text())["text"]
    assert made.sample.split()[0] in made.page.read_text()
    steps, tokens = config.training.steps, IndexedDataset("texts-headless/text").num_tokens
    assert steps == math.ceil(2 * tokens / config.tokens_per_step())
    made.config.write_text(made.config.read_text().replace(f"steps: {steps},", f"steps: {steps + 2},"))
    monkeypatch.chdir("/")
    again = list[str]()
    assert started(again, quick / "texts", folder=quick / "texts-headless").run == made.run
    assert "is there: the run goes on with it, and --minutes does not count; raise `training.steps` there" in again[0]
    assert json.loads((made.run / "ending.json").read_text())["step"] == steps + 2


def test_ctrl_c_saves_and_says_how_to_go_on(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (quick / "texts").mkdir()
    config = Path(config_file(quick, {"training.steps": 100_000}))
    mark = f"# Written by `megahead start` for {quick / 'texts'}"
    (quick / "run.yaml").write_text(f"{mark}\n{config.read_text()}")

    def interrupt() -> None:
        metrics = quick / "run/metrics.jsonl"
        while not metrics.exists() or '"loss"' not in metrics.read_text():
            time.sleep(0.05)
        for child in psutil.Process().children():
            child.send_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    told = list[str]()
    with pytest.raises(KeyboardInterrupt):
        start(quick / "texts", tokenizer="other.json", folder=quick, report=told.append)
    assert "the run goes on with it, and --minutes and --tokenizer do not count" in told[0]
    assert told[-1] == "the same command goes on from here"
    assert json.loads((quick / "run/ending.json").read_text())["ending"] == "stopped"


def test_a_dry_run_writes_nothing(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures the smallest shape first."""
    monkeypatch.setattr(quickstart, "SHAPES", SHAPES)
    mixed(quick / "texts")
    told = list[str]()
    assert start(quick / "texts", dry_run=True, report=told.append) is None
    assert sorted(path.name for path in quick.iterdir()) == ["texts"]
    assert "headless decoder, 2 layers of 128" in told[-1]
    assert "measured" in told[-1]


def test_the_ends_of_few_documents_are_held_out_and_some_of_many(quick: Path) -> None:
    (quick / "book.txt").write_text("\n".join(TEXTS[:8]))
    (quick / "made").mkdir()
    _write_datasets(survey(quick / "book.txt"), None, Plan(SHAPES[0], 512, 1e5, 1.0), quick / "made", [].append)
    tokenizer = load_tokenizer(str(quick / "made/tokenizer.json"))
    train, held_out = (IndexedDataset(quick / f"made/text{part}") for part in ("", "-validation"))
    ends = [tokenizer.decode(dataset.document(0).tolist()) for dataset in (train, held_out)]
    words = [word for end in ends for word in end.replace("<|endoftext|>", "").split()]
    assert words == "\n".join(TEXTS[:8]).split()  # cut between two of them
    assert 0.03 < len(ends[1]) / sum(map(len, ends)) < 0.06
    many = quick / "many.jsonl"
    many.write_text("".join(json.dumps({"text": f"{n} {TEXTS[n % 9][:300]}"}) + "\n" for n in range(250)))
    assert not survey(many).has_fewer_documents(quickstart.FEW_DOCUMENTS)


def test_given_tokenizers_are_taken(quick: Path) -> None:
    (quick / "a.txt").write_text("\n".join(TEXTS[:3]))
    told = list[str]()
    first = started(told, quick / "a.txt", folder=quick / "my first")
    assert f"--config '{first.config}'" in "\n".join(told)
    assert told[-1].endswith(f"--model '{first.model}' --interactive")
    mine = first.config.parent / "tokenizer.json"
    config = load_config(started([], quick / "a.txt", tokenizer=mine, folder=quick / "second").config)
    assert Path(str(config.data.tokenizer)).read_bytes() == mine.read_bytes()
    assert not (quick / "second/tokenizer.json").exists()


def test_what_a_killed_start_left_of_another_text_or_tokenizer_is_written_again(tmp_path: Path) -> None:
    folder, texts = tmp_path / "made", [tmp_path / "one/texts", tmp_path / "two/texts"]
    folder.mkdir()
    for path, text in zip(texts, TEXTS, strict=False):
        path.mkdir(parents=True)
        (path / "a.txt").write_text(text * 20)
    for size in (300, 310):
        save_tokenizer(train_bpe(TEXTS[:3], size), tmp_path / f"{size}.json")
    for path, size in ((texts[0], 300), (texts[1], 300), (texts[1], 310)):
        _write_datasets(survey(path), tmp_path / f"{size}.json", Plan(SHAPES[0], size, 1e5, 1.0), folder, [].append)
        dataset = IndexedDataset(folder / "text")
        tokenizer = dataset.tokenizer_path()
        assert tokenizer is not None
        assert tokenizer.read_bytes() == (tmp_path / f"{size}.json").read_bytes()
        written = load_tokenizer(str(tokenizer)).decode(dataset.document(0).tolist())
        assert written.startswith((path / "a.txt").read_text()[:300])
    (folder / "tokenizer.json").write_text("of another text, whose start was killed")
    _write_datasets(survey(texts[0]), None, Plan(SHAPES[0], 320, 1e5, 1.0), folder, [].append)
    assert load_tokenizer(str(folder / "tokenizer.json")).vocab_size == 320


def test_an_edited_run_may_have_another_head_and_no_held_out_text(quick: Path) -> None:
    changes = {"training.steps": 2, "data.validation": None}
    config = Path(config_file(quick, changes | {"objective.vanilla_weight": 0.3}))
    (quick / "run.yaml").write_text(f"# Written by `megahead start` for {quick / 'texts'}\n{config.read_text()}")
    told = list[str]()
    made = started(told, quick / "texts", folder=quick)
    assert AutoModelForCausalLM.from_pretrained(made.model).config.tie_word_embeddings is False
    assert made.perplexity is None
    assert "perplexity" not in "\n".join(told)


def test_a_larger_shape_that_cannot_be_trained_leaves_the_smaller_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed_step(shape: tuple[int, int], vocab_size: int, max_seconds: float) -> float:
        if shape == SHAPES[1]:
            raise UserError("training must end by itself, but failed with code -9.")
        return 0.01

    monkeypatch.setattr(quickstart, "_measure_shape", timed_step)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) * 10)
    told = list[str]()
    assert quickstart.make_plan(survey(tmp_path), None, 600, told.append).shape == SHAPES[0]
    assert "3 layers of 192 cannot be trained here: training must end by itself, but failed with code -9." in told[-2]


def test_time_and_text_both_bound_the_steps_and_the_shape() -> None:
    much = Plan(SHAPES[1], 8192, 1e9, 0.5)
    assert much.steps(much.other_seconds(1000) + 100) < much.steps(1000)
    assert much.total_seconds(1000) == pytest.approx(1000, abs=0.5)
    assert [much.evaluations(seconds) for seconds in (0, 100, 1000)] == [1, 1, 8]
    assert much.steps(0.1) == quickstart.MIN_TRAINING_SECONDS / 0.5
    assert Plan(SHAPES[1], 8192, 40_960, 0.5).steps(1e6) == quickstart.MAX_EPOCHS * 10


@pytest.mark.parametrize(
    ("slowness", "seconds", "kept", "measured"),
    [(1, 120.0, True, True), (4, 120.0, True, True), (5, 60.0, False, True), (40, 300.0, True, False)],
)
def test_the_plan_keeps_the_minutes_or_a_line_says_by_how_much_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slowness: int, seconds: float, kept: bool, measured: bool
) -> None:
    """By a clock on which the smallest shape starts in 2 s times `slowness`, and trains a step in 10 ms times that."""
    clock, timed, told = [0.0], list[int](), list[str]()

    def timed_step(shape: tuple[int, int], vocab_size: int, max_seconds: float) -> float:
        step_seconds = 0.01 * slowness * shape[0] * shape[1] / 256
        timed.append(shape[0])
        clock[0] += min(max_seconds, 2 * slowness + quickstart.BENCHMARK_STEPS * step_seconds)
        if 2 * slowness >= max_seconds:
            raise TimeoutError
        return step_seconds

    monkeypatch.setattr(quickstart, "monotonic", lambda: clock[0])
    monkeypatch.setattr(quickstart, "_measure_shape", timed_step)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) * 10)
    plan = quickstart.make_plan(survey(tmp_path), None, seconds, told.append)
    assert timed[0] == SHAPES[0][0]
    assert clock[0] <= quickstart.TIMING_SHARE * seconds
    assert plan.is_measured == measured
    assert (clock[0] + plan.total_seconds(seconds - clock[0]) <= seconds + plan.step_seconds) == kept
    monkeypatch.chdir(tmp_path)
    clock[0] = 0.0
    start(tmp_path / "a.txt", minutes=seconds / 60, dry_run=True, report=told.append)
    assert ("more than --minutes" in told[-1]) == (not kept)


@pytest.mark.parametrize(
    ("slowness", "stops", "evaluations"),
    [(0.25, 0, 0), (1.0, 0, 0), (1.05, 0, 0), (1.2, 1, 8), (2.0, 1, 8), (8.0, 1, 2)],
    ids=lambda value: f"{value:g}",
)
def test_a_run_that_is_slower_than_planned_gets_fewer_steps_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slowness: float, stops: int, evaluations: int
) -> None:
    """By a clock on which a step takes `slowness` times 100 ms, of which 1,000 were planned for 100 s, and an
    evaluation that times 1.1 s; `evaluations` then fit into a fifth of the time, 8 at most."""
    clock, told, steps_done, starts = [0.0], list[str](), [0], list[int]()
    config = Path(config_file(tmp_path, {"training.steps": 1000}))
    config.write_text("# header\n" + config.read_text())
    monkeypatch.setattr(quickstart, "pretrain", lambda config, must_stop: train(must_stop))
    for module in (quickstart, run_process):
        monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    record = dict.fromkeys(("tokens", "seconds", "loss"), 1.0)

    def train(must_stop: Callable[[], bool]) -> None:
        steps, ending = load_config(config).training.steps, "finished"
        starts.append(steps_done[0])
        clock[0] += 10
        while steps_done[0] < steps and ending == "finished":
            clock[0] += 5
            steps_done[0] = min(steps, steps_done[0] + round(50 / slowness))
            with (tmp_path / "run/metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": steps_done[0]} | record) + "\n")
            if must_stop():
                ending = "stopped"
        (tmp_path / "run/ending.json").write_text(json.dumps({"ending": ending}))

    (tmp_path / "run").mkdir()
    plan = Plan(SHAPES[0], 512, 1e9, 0.1, startup_seconds=10)
    assert quickstart._train_until(110, config, plan, 6, told.append) == "finished"
    assert len(starts) == 1 + stops == 1 + len(told)
    training = load_config(config).training
    assert steps_done[0] == training.steps
    assert not stops or math.ceil(training.steps / training.evaluate_every) == evaluations
    assert config.read_text().startswith("# header\n")
    assert clock[0] <= 110 * 1.05


def test_a_process_is_stopped_before_its_first_step_or_saves(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(run_process, "POLL_SECONDS", 0.01)
    with pytest.raises(TimeoutError):
        quickstart._measure_shape((1, 64), 512, 0.0)
    metrics, ending = quick / "run/metrics.jsonl", quick / "run/ending.json"
    config = config_file(quick, {"training.steps": 100_000})
    pretrain(config, quiet=True, must_stop=lambda: metrics.exists() and '"loss"' in metrics.read_text())
    assert json.loads(ending.read_text())["ending"] == "stopped"
    assert (quick / "run/checkpoints/latest").exists()


def test_a_log_that_goes_back_tells_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = [0.0], tmp_path / "metrics.jsonl"
    monkeypatch.setattr(run_process, "monotonic", lambda: clock[0])
    monitor = run_process.DeadlineMonitor(tmp_path, steps=1000, deadline=100, startup_seconds=1, tolerance=1)
    for step in (10, 7, 10, 11):
        clock[0] += 20
        log.write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")
        assert monitor.must_stop() is (step == 11)


def test_the_reason_of_a_failure_during_a_check_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nsleep 0.1; echo the reason; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr(run_process, "POLL_SECONDS", 0.01)
    with pytest.raises(UserError, match="with code 3: the reason"):
        pretrain("config.yaml", quiet=True, must_stop=lambda: bool(time.sleep(0.3)))


def test_ctrl_c_leaves_no_process_at_whichever_moment_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nsleep 1; touch saved; exit 130\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr(run_process, "POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pretrain("config.yaml", quiet=True, must_stop=lambda: bool(os.kill(os.getpid(), signal.SIGINT)))
    assert (tmp_path / "saved").exists()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_killed_launcher_is_not_waited_for_though_its_ranks_have_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nsleep 20 & echo $! > rank; echo the end; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr(run_process, "POLL_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    with pytest.raises(UserError, match="with code 3: the end"):
        pretrain("config.yaml", quiet=True, must_stop=lambda: False)
    assert time.monotonic() - start < 10
    psutil.Process(int((tmp_path / "rank").read_text())).kill()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "must hold text, but it is empty"),
        ({"a.pdf": b"%PDF"}, r"must hold text, but `.*a\.pdf` does not end in one of \.jsonl"),
        ({"a.txt": b" \n"}, r"must hold text, but `.*a\.txt` has no text"),
        ({"a.txt": b"\xff\xfe\x00"}, r"must hold text, but `.*a\.txt` must be UTF-8 text"),
        ({"a.csv": b"x,y\n1,2\n"}, ""),
    ],
)
def test_folders_without_text_are_refused(tmp_path: Path, files: dict[str, bytes], says: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    if not says:
        assert survey(tmp_path).keys == ("x",)
        return
    with pytest.raises(DataError, match=says):
        survey(tmp_path)


def test_a_text_is_preferred_to_a_content_of_which_there_is_more(tmp_path: Path) -> None:
    (tmp_path / "large.jsonl").write_text(json.dumps({"content": "a b " * 200}))
    (tmp_path / "small.jsonl").write_text(json.dumps({"text": "one", "content": "two"}))
    assert survey(tmp_path).keys == ("text", "content")


def test_what_cannot_be_opened_or_is_another_programs_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/state.json").write_text('{"window": 1}')
    (tmp_path / "app/plain.txt").write_text("some text")
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "marked.json").write_text(json.dumps([{"text": "one"}], indent=1), encoding="utf-8-sig")
    found = survey(tmp_path)
    assert [item.path.name for item in found.inputs] == ["marked.json", "plain.txt"]
    why = {file.name: reason for file, reason in found.skipped.items()}
    assert why["none.json"] == why["state.json"] == "has no text"
    assert why["dangling.txt"].startswith("must be a text file, but there is none")


def test_files_that_break_off_later_are_named_and_left_out(tmp_path: Path) -> None:
    rows = "".join(f"{n},{'some words of a row ' * 50}\n" for n in range(6000))
    (tmp_path / "broken.csv").write_bytes(f"id,text\n{rows}".encode() + b"9,\xff\n")
    packed = gzip.compress(random.Random(0).randbytes(6_000_000).hex().encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-1000])
    (tmp_path / "cut.txt.gz").write_bytes(packed[:-1000])
    (tmp_path / "sound.csv").write_text(f"id,text\n{rows}")
    found = survey(tmp_path)
    assert [item.path.name for item in found.inputs] == ["sound.csv"]
    why = {file.name: reason for file, reason in found.skipped.items()}
    assert why["broken.csv"].startswith("must be a table in UTF-8 text, but is not")
    assert why["cut.txt.gz"].startswith("must be readable to its end, but is not")
    assert why["cut.jsonl.gz"] == why["cut.txt.gz"]


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    for name in ("elsewhere", "texts/own"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text("some text")
    for link, target in (("linked", "elsewhere"), ("again", "texts/own"), ("own/loop", "texts")):
        (tmp_path / "texts" / link).symlink_to(tmp_path / target)
    found = [item.path.relative_to(tmp_path / "texts") for item in survey(tmp_path / "texts").inputs]
    assert found == [Path("again/a.txt"), Path("linked/a.txt")]


def test_what_a_start_made_is_no_text_where_a_link_leads_to_it(tmp_path: Path) -> None:
    for name in ("texts/a.txt", "made/notes.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("some text")
    (tmp_path / "texts/loop").symlink_to(tmp_path)
    assert [item.path.name for item in survey(tmp_path / "texts", tmp_path / "made").inputs] == ["a.txt"]


def test_text_without_a_space_gets_a_tokenizer_in_little_time(tmp_path: Path) -> None:
    drawn = random.Random(0).choices([text[:5] for text in "".join(TEXTS).split() if text.isalpha()], k=60_000)
    began = time.process_time()
    tokenizer = train_bpe(["".join(drawn)], 1024)
    assert time.process_time() - began < 5  # 20 and more, were it one word
    assert tokenizer.get_vocab_size() == 1024
    assert tokenizer.decode(tokenizer.encode("".join(drawn)).ids) == "".join(drawn)


def test_text_counts_before_other_keys_whatever_their_files_sizes(tmp_path: Path) -> None:
    (tmp_path / "large.jsonl").write_text(json.dumps({"body": "long " * 100}))
    (tmp_path / "small.jsonl").write_text(json.dumps({"body": "no", "text": "yes"}))
    found = survey(tmp_path)
    assert found.keys == ("text", "body")


def test_what_a_start_made_is_no_text_of_a_later_one(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (quick / "a.txt").write_text("\n".join(TEXTS[:3]))
    made = folder_of(Path())
    made.mkdir()
    (made / "notes.txt").write_text("of a start that was killed")
    told = list[str]()
    start(".", dry_run=True, report=told.append)
    assert "1 .txt file" in told[0]
    assert folder_of(Path()) == folder_of(Path("../" + quick.name))


def test_what_cannot_work_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS[:3]))
    save_tokenizer(train_bpe(["some text"], 300), tmp_path / "no-end.json")
    spelled = (tmp_path / "no-end.json").read_text(encoding="utf-8")
    (tmp_path / "no-end.json").write_text(spelled.replace("<|endoftext|>", "<finis>"), encoding="utf-8")
    monkeypatch.setattr(quickstart, "make_plan", lambda *_: pytest.fail("measured"))
    with pytest.raises(FieldError, match=r"`--tokenizer` must have the token <\|endoftext\|>, which closes documents"):
        start(tmp_path / "a.txt", tokenizer=tmp_path / "no-end.json", folder=tmp_path / "made")
    for folder, why in ((tmp_path / "a.txt", "File exists"), (Path("/proc"), "[A-Z].*")):
        rule = rf"`--folder` must be a folder that can be written to, but is {folder} \({why}\) instead; name another"
        with pytest.raises(FieldError, match=rule):
            start(tmp_path / "a.txt", folder=folder)


def test_a_folder_made_of_another_text_and_too_little_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "little.txt").write_text("a few words")
    with pytest.raises(FieldError, match=r"`PATH` must hold at least 10,000 bytes .* but is .*little\.txt with 11 "):
        start(tmp_path / "little.txt")
    (tmp_path / "little.txt.gz").write_bytes(gzip.compress(random.Random(0).randbytes(1500).hex().encode()))
    packed_bytes = (tmp_path / "little.txt.gz").stat().st_size
    with pytest.raises(FieldError, match=rf"but is .*little\.txt\.gz with {3 * packed_bytes:,} "):
        start(tmp_path / "little.txt.gz")
    (tmp_path / "made").mkdir()
    (tmp_path / "made/run.yaml").write_text("# Written by `megahead start` for /of/others\n")
    with pytest.raises(
        FieldError,
        match=r"`--folder` must hold nothing that was made of another text than .*, but is .*made, made of /of/others",
    ):
        start(tmp_path / "little.txt", folder=tmp_path / "made")


def test_too_little_time_and_missing_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"`--minutes` must be at least 1, but is 0\.5"):
        start(tmp_path, minutes=0.5)
    with pytest.raises(DataError, match="does not exist"):
        start(tmp_path / "nowhere")
