"""Whole runs with their checkpoints and texts in a store: a disk may be lost, and the store may fail."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megahead.checkpoints.reading import open_checkpoint
from megahead.checkpoints.transfer import Uploader
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.remote_files import Store
from megahead.report.read import events_of, read_metrics, read_runs
from megahead.train.datasets import open_datasets
from megahead.train.run import pretrain
from megahead.train.session import resolve_resume
from support.far_stores import Faulty, faults, s3  # noqa: F401 - a fixture
from support.killable import codes, said, start_ranks
from support.long import long
from support.mirrored import steps_in_mirror
from support.named import folder_of, without_digits
from support.on_ranks import on_ranks
from support.small_checkpoint import save_tokenizer
from support.small_run import same_tensors, small_config, stage, write_text

EVERY_TWO = {"training.checkpoint_every": 2, "training.keep_checkpoints": 2}


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    try:
        return pretrain(config, Launch(), resume).ending
    except UserError as error:
        return str(error)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "store").mkdir()


@pytest.fixture(autouse=True)
def _none_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint is in the mirror before the next step: on a busy machine some would be left out."""
    offer = Uploader.enqueue

    def offer_and_wait(mirror: Uploader, folder: Path, *, is_new: bool = True) -> None:
        offer(mirror, folder, is_new=is_new)
        for _ in mirror.wait_until_done(time.monotonic() + 60):
            pass

    monkeypatch.setattr(Uploader, "enqueue", offer_and_wait)


def mirrored(folder: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    """A run with a mirror in `folder`/store."""
    return small_config(folder, EVERY_TWO | {"training.remote_checkpoints": f"file://{folder}/store"} | (changes or {}))


def undisturbed(folder: Path, ranks: int, changes: dict[str, Any]) -> Path:
    """The same run without store or kill."""
    there = str(folder / "undisturbed")
    assert on_ranks(ranks, run, small_config(folder, changes | {"output_dir": there})) == ["finished"] * ranks
    return Path(there)


@pytest.mark.parametrize(
    "changes", [stage(1) | {"training.save_in_background": True}, long(stage(1))], ids=["background", "at once"]
)
def test_an_empty_disk_goes_on_from_the_mirror_and_the_run_is_the_same(
    changes: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)
    shorter, longer = {**changes, "training.steps": 4}, {**changes, "training.steps": 8}
    schedule = {"schedule.name": "constant"}
    assert on_ranks(2, run, mirrored(tmp_path, shorter | schedule)) == ["finished"] * 2
    assert steps_in_mirror(f"file://{tmp_path}/store") == [2, 4]
    shutil.rmtree(tmp_path / "run")
    capfd.readouterr()
    assert on_ranks(2, run, mirrored(tmp_path, longer | schedule)) == ["finished"] * 2
    assert f"mirror      step 4 from file://{tmp_path}/store in " in capfd.readouterr().out
    assert steps_in_mirror(f"file://{tmp_path}/store") == [6, 8]
    assert same_tensors(tmp_path / "run", undisturbed(tmp_path, 2, longer | schedule))
    assert same_tensors(tmp_path / "store", tmp_path / "run")
    assert [record["step"] for record in read_metrics(tmp_path / "run").training] == list(range(1, 9))
    assert (tmp_path / "store/metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()
    assert (tmp_path / "store/ending.json").read_bytes() == (tmp_path / "run/ending.json").read_bytes()
    texts = [without_digits(event.text) for event in events_of(read_runs([tmp_path / "run"])[0])]
    assert texts == ["resumed from step-00000004", "the checkpoint came from the remote store"]


def test_a_disk_with_older_checkpoints_gets_the_mirrors_newer_one(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(1, run, mirrored(tmp_path)) == ["finished"]
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "run", whole)
    shutil.rmtree(folder_of(tmp_path / "run", 6))
    assert on_ranks(1, run, mirrored(tmp_path, {"training.steps": 7})) == ["finished"]
    assert resumed_by_each(tmp_path / "run") == [None, "step-00000006"]


def resumed_by_each(run: Path) -> list[str | None]:
    """What each session went on from."""
    records = [record["session"]["resumed"] for record in read_metrics(run).events if "session" in record]
    return [name and without_digits(name) for name in records]


def test_a_checkpoint_that_was_not_sent_goes_there_when_the_next_session_begins(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(1, run, small_config(tmp_path, EVERY_TWO)) == ["finished"]
    assert on_ranks(1, run, mirrored(tmp_path)) == ["finished"]
    assert steps_in_mirror(f"file://{tmp_path}/store") == [6]


def test_a_mirror_without_a_sound_checkpoint_is_no_new_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(1, run, mirrored(tmp_path)) == ["finished"]
    for file in (tmp_path / "store/checkpoints").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    shutil.rmtree(tmp_path / "run")
    first, second = on_ranks(2, run, mirrored(tmp_path))
    assert first == second
    assert "must hold a valid checkpoint to continue from, but holds only damaged ones (2)" in first


def test_the_mirror_of_another_run_is_neither_fetched_nor_changed(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(1, run, mirrored(tmp_path)) == ["finished"]
    other = {"output_dir": str(tmp_path / "other")}
    (sentence,) = on_ranks(1, run, mirrored(tmp_path, other | {"optimizer.learning_rate": 1.0}))
    assert sentence.startswith(
        f"file://{tmp_path}/store (step 6) must be of the same run to resume, but differs in optimizer.learning_rate"
    )
    assert on_ranks(1, run, small_config(tmp_path, other)) == ["finished"]
    (sentence,) = on_ranks(1, run, mirrored(tmp_path, other))
    assert sentence.startswith("`training.remote_checkpoints` must be this run's or empty, but ")
    assert steps_in_mirror(f"file://{tmp_path}/store") == [4, 6]


def test_far_checkpoints_can_be_resumed_and_started_from_by_name(tmp_path: Path) -> None:
    write_text(tmp_path)
    url = f"file://{tmp_path}/store"
    assert on_ranks(1, run, mirrored(tmp_path)) == ["finished"]
    assert on_ranks(2, run, mirrored(tmp_path), f"{url}/checkpoints/step-00000004") == ["finished"] * 2
    assert steps_in_mirror(url) == [4, 6]
    elsewhere = small_config(tmp_path, EVERY_TWO | {"output_dir": str(tmp_path / "elsewhere"), "training.steps": 8})
    assert on_ranks(2, run, elsewhere, url) == ["finished"] * 2
    started = small_config(
        tmp_path, {"output_dir": str(tmp_path / "started"), "init": {"from_checkpoint": url, "mode": "continue"}}
    )
    assert on_ranks(2, run, started) == ["finished"] * 2
    assert not list(tmp_path.rglob("fetched"))
    (sentence,) = on_ranks(1, run, started, f"{url}/nowhere")
    assert "/nowhere` must be a checkpoint, or the folder of a run that has one, but holds none" in sentence


def test_a_step_of_ones_own_mirror_comes_to_an_empty_disk_with_the_log_up_to_there(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(2, run, mirrored(tmp_path)) == ["finished"] * 2
    shutil.rmtree(tmp_path / "run")
    step = f"file://{tmp_path}/store/checkpoints/step-00000004"
    assert on_ranks(2, run, mirrored(tmp_path), step) == ["finished"] * 2
    assert [record["step"] for record in read_metrics(tmp_path / "run").training] == list(range(1, 7))


def test_a_step_of_ones_own_mirror_takes_the_place_of_newer_ones_with_the_first_save(tmp_path: Path) -> None:
    write_text(tmp_path)
    url, changes = f"file://{tmp_path}/store", {"schedule.name": "constant", "training.evaluate_every": 2}
    assert on_ranks(1, run, mirrored(tmp_path, changes)) == ["finished"]
    for steps, there in ((4, [4, 6]), (5, [4, 5])):
        shutil.rmtree(tmp_path / "run")
        again = mirrored(tmp_path, changes | {"training.steps": steps})
        assert on_ranks(1, run, again, f"{url}/checkpoints/step-00000004") == ["finished"]
        assert steps_in_mirror(url) == there


def test_what_another_session_is_fetching_stays_when_one_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    (others := tmp_path / "run/fetched/checkpoints").mkdir(parents=True)
    (sentence,) = on_ranks(1, run, small_config(tmp_path), str(tmp_path / "nowhere"))
    assert "must be auto, never or a checkpoint folder" in sentence
    assert others.is_dir()


def test_what_was_fetched_to_be_resumed_does_not_stay_if_it_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(1, run, mirrored(tmp_path)) == ["finished"]
    other = {"output_dir": str(tmp_path / "other"), "optimizer.learning_rate": 1.0}
    (sentence,) = on_ranks(1, run, small_config(tmp_path, other), f"file://{tmp_path}/store")
    assert "must be of the same run to resume, but differs in optimizer.learning_rate" in sentence
    assert not list((tmp_path / "other").rglob("*"))


def test_where_the_mirrors_newer_checkpoints_are_damaged_the_disks_newest_goes_there_again(tmp_path: Path) -> None:
    write_text(tmp_path)
    changes = {"schedule.name": "constant", "training.evaluate_every": 2}
    assert on_ranks(1, run, mirrored(tmp_path, changes)) == ["finished"]
    shutil.rmtree(folder_of(tmp_path / "run", 6))
    shutil.rmtree(folder_of(tmp_path / "store", 4))
    for file in folder_of(tmp_path / "store", 6).glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    assert on_ranks(1, run, mirrored(tmp_path, changes | {"training.steps": 4})) == ["finished"]
    assert open_checkpoint(folder_of(tmp_path / "store", 4)).step == 4
    assert steps_in_mirror(f"file://{tmp_path}/store") == [4, 6]  # until a step is saved that takes its place


def test_a_named_one_that_is_refused_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next session would take it for what the run had gone back to."""
    monkeypatch.setattr("megahead.checkpoints.transfer.RETRY_DELAYS", (0.0,))
    write_text(tmp_path)
    changes = {"schedule.name": "constant", "training.remote_checkpoints": f"faulty://{tmp_path}/store"}
    assert on_ranks(1, run, mirrored(tmp_path, changes)) == ["finished"]
    shutil.rmtree(folder_of(tmp_path / "run", 6))
    back, five = str(tmp_path / "run/checkpoints/step-00000004"), changes | {"training.steps": 5}
    with faults("fails", "step-"):
        assert on_ranks(1, run, mirrored(tmp_path, five), back) == ["finished"]
    other, named = changes | {"optimizer.learning_rate": 1.0}, f"faulty://{tmp_path}/store/checkpoints/step-00000006"
    (refused,) = on_ranks(1, run, mirrored(tmp_path, other), named)
    assert "optimizer.learning_rate" in refused
    assert f"{named} (step 6)" in refused
    assert on_ranks(1, run, mirrored(tmp_path, changes)) == ["finished"]
    assert resumed_by_each(tmp_path / "run") == [None, "step-00000004", "step-00000005"]


def fetched_by_name(group: Group, config: RunConfig, resume: str) -> str:
    return resolve_resume(resume, config, open_datasets(config, group), group)


def test_a_session_that_was_killed_once_it_had_what_was_named_is_followed_by_another(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(1, run, mirrored(tmp_path)) == ["finished"]
    step = folder_of(tmp_path / "store", 4).relative_to(tmp_path / "store")
    again = mirrored(tmp_path, {"output_dir": str(tmp_path / "other")})
    for _ in range(2):
        found = on_ranks(2, fetched_by_name, again, f"file://{tmp_path}/store/{step}")
        assert found == [str(tmp_path / "other" / step)] * 2
    assert on_ranks(2, run, again) == ["finished"] * 2


def run_in_bad_store(group: Group, config: RunConfig, fault: str) -> str:
    with faults(fault, "step-"):
        return run(group, config)


@pytest.mark.parametrize("fault", ["loses", "cuts", "fails"])
def test_a_store_that_loses_writes_costs_the_copies_and_not_the_run(
    fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path)
    monkeypatch.setattr("megahead.checkpoints.transfer.RETRY_DELAYS", (0.0, 0.0))
    config = mirrored(tmp_path, {"training.remote_checkpoints": f"{Faulty.protocol}://{tmp_path}/store"})
    assert on_ranks(2, run_in_bad_store, config, fault) == ["finished"] * 2
    assert "step 6 is not in the remote store, only in " in capfd.readouterr().out
    assert steps_in_mirror(f"file://{tmp_path}/store") == []
    assert open_checkpoint(tmp_path / "run").step == 6
    wrong = [event.text for event in events_of(read_runs([tmp_path / "run"])[0]) if event.wrong]
    assert wrong[-1].startswith("step 6 did not get to the remote store: `faulty://")


def test_a_place_where_nothing_can_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "closed").write_text("a file, and no folder")
    first, second = on_ranks(
        2, run, mirrored(tmp_path, {"training.remote_checkpoints": f"file://{tmp_path}/closed/run"})
    )
    assert first == second
    assert "/closed/run` must be reachable, but is not (" in first
    assert not (tmp_path / "run").exists()


def test_texts_and_tokenizer_come_from_a_store_once_for_all_ranks_of_a_node(tmp_path: Path) -> None:
    write_text(tmp_path / "store")
    save_tokenizer(tmp_path / "store/tokenizer.json")
    write_text(tmp_path)
    far = f"file://{tmp_path}/store"
    changes = {"data.train": f"{far}/text", "data.validation": f"{far}/text", "data.tokenizer": f"{far}/tokenizer.json"}
    changes |= {"data.pack": "best_fit", "model.vocab_size": 300}
    assert on_ranks(4, run, small_config(tmp_path, changes)) == ["finished"] * 4
    near = changes | {"data.train": f"{tmp_path}/text", "data.tokenizer": str(tmp_path / "store/tokenizer.json")}
    assert same_tensors(tmp_path / "run", undisturbed(tmp_path, 4, near))
    assert (tmp_path / "run/tokenizer.json").read_bytes() == (tmp_path / "store/tokenizer.json").read_bytes()
    assert len(list((tmp_path / "cache").rglob("text.bin"))) == 1
    assert open_checkpoint(tmp_path / "run").config["data"]["train"] == f"{far}/text"
    missing = small_config(tmp_path, {"data.train": f"{far}/none", "output_dir": str(tmp_path / "other")})
    assert (
        on_ranks(2, run, missing)
        == [f"`{far}/none` must exist, but does not; give the prefix of a `.bin` and `.idx` pair, without ending."] * 2
    )


def die_when_naming_the_second(rank: int) -> None:
    """From here on this process is killed when all of the second checkpoint has arrived but its name."""
    write, named = Store.write, []

    def write_or_die(store: Store, name: str, content: bytes) -> None:
        if name.endswith("checkpoint.json"):
            named.append(name)
        if len(named) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write(store, name, content)

    Store.write = write_or_die  # type: ignore[method-assign]


@pytest.mark.long
def test_a_run_killed_in_an_upload_goes_on_from_s3_on_an_empty_disk_bit_for_bit(
    s3: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Its text is there as well. What was half sent does not count, and is removed by the next upload."""
    write_text(tmp_path)
    for ending in (".bin", ".idx", ".json"):
        Store(s3).put(tmp_path / f"text{ending}", f"data/text{ending}")
    steps = {"training.steps": 12, "training.evaluate_every": 12}
    far = {"training.remote_checkpoints": f"{s3}/runs/small", "data.train": f"{s3}/data/text", "data.validation": None}
    config = small_config(tmp_path, EVERY_TWO | steps | far | stage(1))
    ended = codes(start_ranks(config, 2, tmp_path, sabotage=die_when_naming_the_second))
    assert ended[0] == -signal.SIGKILL, said(tmp_path, 0)
    assert steps_in_mirror(f"{s3}/runs/small") == [2]
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "cache")
    assert codes(start_ranks(config, 2, tmp_path)) == [0, 0], said(tmp_path, 0)
    assert f"mirror      step 2 from {s3}/runs/small in " in said(tmp_path, 0)
    left_alone = undisturbed(tmp_path, 2, steps | stage(1) | {"data.validation": None})
    assert same_tensors(tmp_path / "run", left_alone)
    kept = steps_in_mirror(f"{s3}/runs/small")
    assert kept[-1] == 12
    assert len(kept) == 2
    folders = {without_digits(name.split("/")[1]) for name in Store(f"{s3}/runs/small").sizes("checkpoints")}
    assert folders == {"latest", *(f"step-{step:08d}" for step in kept)}
    assert "not-to-be-told" not in "".join(
        path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()
    )
