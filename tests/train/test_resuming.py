"""What may and may not change between two sessions of a run, and which checkpoint is taken when some are damaged."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megahead.checkpoints import reading
from megahead.checkpoints.format import FileEntry
from megahead.checkpoints.reading import open_checkpoint
from megahead.commands.pretrain import describe
from megahead.config.run import RunConfig
from megahead.data.train_tokenizer import train_wordpiece
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import CheckpointError, ConfigErrors, UserError
from megahead.report.read import read_metrics
from megahead.train.run import pretrain
from support.named import folder_of, orphaned_steps, steps_of_history, without_digits
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, write_text


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    try:
        return pretrain(config, Launch(), resume).ending
    except UserError as error:
        return str(error)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with a text and a finished run with checkpoints at steps 3 and 6."""
    write_text(tmp_path)
    assert on_ranks(1, run, small_config(tmp_path)) == ["finished"]
    return tmp_path


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"optimizer.learning_rate": 1e-3}, "optimizer.learning_rate (was 0.003, is 0.001)"),
        ({"schedule.warmup_steps": 1}, "schedule.warmup_steps (was 2, is 1)"),
        ({"engine.precision": "bf16"}, "engine.precision (was fp32, is bf16)"),
        ({"objective.temperature": 2.0}, "objective.temperature (was 1.0, is 2.0)"),
    ],
)
def test_what_decides_the_outcome_must_be_allowed_by_name(begun: Path, changes: dict[str, Any], differing: str) -> None:
    (sentence,) = on_ranks(1, run, small_config(begun, changes | {"training.steps": 7}))
    assert differing in sentence
    assert "name them in resume.allow" in sentence
    section = next(iter(changes)).split(".")[0]
    for allowed in (next(iter(changes)), section):
        allowing = changes | {"training.steps": 7, "resume.allow": [allowed], "output_dir": str(begun / allowed)}
        source = str(begun / "run/checkpoints/step-00000003")
        assert on_ranks(1, run, small_config(begun, allowing), source) == ["finished"]


def test_length_place_logging_and_mesh_may_change_and_the_text_may_move(begun: Path) -> None:
    for ending in (".bin", ".idx", ".json"):
        (begun / f"text{ending}").rename(begun / f"moved{ending}")
    changes = {
        "name": "other",
        "training.steps": 8,
        "schedule.warmup_steps": 2 / small_config(begun).training.steps,
        "training.log_seconds": 9.0,
        "data.train": str(begun / "moved"),
        "data.validation": None,
        "data.prefetch": 0,
        "batch.micro_size": 2,
        "engine.deepspeed": {"zero_optimization": {"stage": 1}},
    }
    assert on_ranks(2, run, small_config(begun, changes)) == ["finished"] * 2
    assert open_checkpoint(begun / "run").step == 8


def test_a_run_that_is_made_longer_says_where_its_learning_rate_goes_on(
    begun: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A cosine has fallen to a tenth at step 6 of 6, and by far less at step 6 of 12; a constant rate stays."""
    told = "rate now    learning rate 1.65e-03 at step 6 of 12; the schedule before, of 6 steps, had 3.00e-04 there\n"
    assert on_ranks(1, run, small_config(begun, {"training.steps": 12})) == ["finished"]
    assert told in capfd.readouterr().out
    assert read_metrics(begun / "run").training[6]["learning_rate"] == pytest.approx(1.65e-3)
    assert on_ranks(1, run, small_config(begun, {"training.steps": 12})) == ["finished"]
    constant = {"schedule.name": "constant", "output_dir": str(begun / "constant")}
    for steps in (3, 6):
        assert on_ranks(1, run, small_config(begun, constant | {"training.steps": steps})) == ["finished"]
    assert "rate now" not in capfd.readouterr().out


def test_another_text_or_tokenizer_behind_the_same_path_is_refused(begun: Path) -> None:
    config = small_config(begun, {"training.steps": 7})
    write_text(begun, seed=5)
    (sentence,) = on_ranks(1, run, config)
    assert "data.train (was ['" in sentence
    assert "tokens, sha256 " in sentence
    allowed = small_config(begun, {"training.steps": 7, "resume.allow": ["data.train"]})
    assert on_ranks(1, run, allowed) == ["finished"]
    train_wordpiece(["the cat sat"], 60).save(str(begun / "tokenizer.json"))
    given = {"training.steps": 8, "data.tokenizer": str(begun / "tokenizer.json")}
    (sentence,) = on_ranks(1, run, small_config(begun, given))
    assert "data.tokenizer (was None, is " in sentence
    assert "data.train" not in sentence


def test_allowing_what_is_no_setting_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"`resume\.allow` must name settings or their sections, but is 'optimiser'"):
        small_config(tmp_path, {"resume.allow": ["optimiser"]})


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink], ids=["flipped", "truncated", "missing"])
def test_auto_takes_the_newest_sound_checkpoint_and_names_the_damaged_file(
    begun: Path, damage: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    source = begun / "run/checkpoints"
    (file,) = folder_of(source, 6).glob("*.safetensors")
    valid = small_config(begun, {"output_dir": str(begun / "valid")})
    assert on_ranks(2, run, valid, str(source / "step-00000003")) == ["finished"] * 2
    damage(file)
    capfd.readouterr()
    assert on_ranks(2, run, small_config(begun)) == ["finished"] * 2
    told = capfd.readouterr().out
    assert f"damaged     `{file}` must" in told
    assert "resumed     step 3" in told
    assert same_tensors(begun / "run", begun / "valid")


def test_a_run_with_damaged_checkpoints_only_does_not_start_anew(begun: Path) -> None:
    for file in (begun / "run/checkpoints").glob("*/checkpoint.json"):
        flip(file)
    first, second = on_ranks(2, run, small_config(begun))
    assert first == second
    assert "must hold a valid checkpoint to continue from, but holds only damaged ones (2)" in first
    there = sorted(without_digits(path.name) for path in (begun / "run/checkpoints").glob("step-*"))
    assert there == ["step-00000003", "step-00000006"]


def both(folder: Path) -> tuple[list[int], list[int]]:
    """Of the run's history, and of what is orphaned."""
    return steps_of_history(folder / "run"), orphaned_steps(folder / "run")


EVERY_TWO = {"training.steps": 8, "training.checkpoint_every": 2, "training.keep_checkpoints": 2}


def test_an_older_checkpoint_that_is_named_begins_another_history(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was saved after it is orphaned by the first save, found by its own name only, and not counted."""
    write_text(tmp_path)
    steps = {**EVERY_TWO, "training.keep_checkpoints": 9}
    assert on_ranks(2, run, small_config(tmp_path, steps)) == ["finished"] * 2
    other = {**EVERY_TWO, "training.steps": 5, "optimizer.learning_rate": 1e-3, "resume.allow": ["optimizer"]}
    older = str(tmp_path / "run/checkpoints/step-00000002")
    capfd.readouterr()
    assert on_ranks(2, run, small_config(tmp_path, other), older) == ["finished"] * 2
    told = without_digits(capfd.readouterr().out)
    assert "orphaned    from the next save on: step-00000008, step-00000006, step-00000004" in told
    assert both(tmp_path) == ([4, 5], [4, 6, 8])
    assert [record["step"] for record in read_metrics(tmp_path / "run").training] == [1, 2, 3, 4, 5]
    assert on_ranks(2, run, small_config(tmp_path, other | {"training.steps": 6})) == ["finished"] * 2
    assert "resumed     step 5" in capfd.readouterr().out
    assert open_checkpoint(tmp_path / "run").step == 6

    abandoned = folder_of(tmp_path / "run", 8)
    longer = small_config(tmp_path, EVERY_TWO | {"training.steps": 9})
    assert on_ranks(2, run, longer, str(abandoned)) == ["finished"] * 2
    undisturbed = {**EVERY_TWO, "training.steps": 9, "output_dir": str(tmp_path / "undisturbed")}
    source = open_checkpoint(abandoned)
    assert source.step == 8
    assert on_ranks(2, run, small_config(tmp_path, undisturbed), str(abandoned)) == ["finished"] * 2
    assert same_tensors(tmp_path / "run", tmp_path / "undisturbed")
    assert both(tmp_path) == ([8, 9], [5, 6])


def test_a_dry_run_refuses_settings_that_the_checkpoint_does_not_have(begun: Path) -> None:
    changed = small_config(begun, {"optimizer.learning_rate": 1e-3})
    for resume in ("auto", str(begun / "run/checkpoints/3")):
        with pytest.raises(CheckpointError, match=r"differs in optimizer.learning_rate \(was 0.003, is 0.001\);"):
            describe(changed, 2, resume)
    assert "all 4 exist" in describe(changed, 2, "never")  # which is refused when it starts


def test_a_dry_run_of_a_run_that_resumes_needs_nothing_that_init_names(begun: Path) -> None:
    gone = {"init": {"from_checkpoint": str(begun / "gone"), "mode": "continue"}, "resume.allow": ["init"]}
    config = small_config(begun, gone | {"engine.precision": "auto", "training.steps": 7})
    assert "files       all 4 exist" in describe(config, 2)
    elsewhere = config.model_copy(update={"output_dir": str(begun / "new")})
    assert f"files       missing: {begun}/gone" in describe(elsewhere, 2)
    training = config.training.model_copy(update={"remote_checkpoints": "s3://bucket/run"})
    assert "missing" not in describe(elsewhere.model_copy(update={"training": training}), 2)


def test_a_dry_run_names_a_tokenizer_that_is_gone_also_where_there_is_a_checkpoint(begun: Path) -> None:
    config = small_config(begun, {"data.tokenizer": str(begun / "gone.json")})
    assert f"files       missing: {begun}/gone.json" in describe(config, 2)


def run_in_launch(group: Group, config: RunConfig, launch_id: str, resume: str) -> tuple[str, str]:
    """How the session ends, and where it began."""
    ending = pretrain(config, Launch(launch_id=launch_id), resume).ending
    event = next(event for event in reversed(read_metrics(config.folder().path).events) if "session" in event)
    return ending, without_digits(str(event["session"]["resumed"]))


def test_a_launcher_that_restarts_ranks_begins_only_once_where_its_arguments_say(begun: Path) -> None:
    older = str(folder_of(begun / "run", 3))
    shorter, longer = small_config(begun, {"training.steps": 5}), small_config(begun, {"training.steps": 7})
    for launch_id, config, resumed in [
        ("a", shorter, "step-00000003"),
        ("a", longer, "step-00000005"),  # a restart
        ("a", longer, "step-00000007"),
        ("b", shorter, "step-00000003"),  # by hand
        ("", longer, "step-00000003"),  # as always without a launcher that restarts
        ("b", longer, "step-00000003"),  # a restart before its first save: another launch saved the newest
    ]:
        assert on_ranks(1, run_in_launch, config, launch_id, older) == [("finished", resumed)]


def test_a_launch_that_may_not_resume_resumes_its_own_checkpoints(tmp_path: Path) -> None:
    write_text(tmp_path)
    config, longer = small_config(tmp_path), small_config(tmp_path, {"training.steps": 7})
    assert on_ranks(1, run_in_launch, config, "a", "never") == [("finished", "None")]
    assert on_ranks(1, run_in_launch, longer, "a", "never") == [("finished", "step-00000006")]
    (sentence,) = on_ranks(1, run, longer, "never")
    assert "needs an output folder without checkpoints" in sentence


def test_a_link_to_one_of_its_own_is_that_one(begun: Path) -> None:
    """Also where that one lies elsewhere, behind a link."""
    own = folder_of(begun / "run", 3)
    shutil.move(own, begun / "moved")
    own.symlink_to(begun / "moved")
    (begun / "best").symlink_to(own)
    for resume in (begun / "best", own, begun / "moved"):
        config = small_config(begun, {"training.steps": 4})
        assert on_ranks(1, run, config, str(resume)) == ["finished"]
        assert steps_of_history(begun / "run") == [3, 4]


def test_training_past_a_damaged_checkpoint_does_not_count_it(begun: Path) -> None:
    (file,) = folder_of(begun / "run", 6).glob("*.safetensors")
    flip(file)
    config = small_config(begun, {"training.steps": 5, "training.keep_checkpoints": 2})
    assert on_ranks(1, run, config) == ["finished"]
    assert both(begun) == ([3, 5], [6])
    assert on_ranks(1, run, small_config(begun)) == ["finished"]
    assert open_checkpoint(begun / "run").step == 6


def test_a_folder_with_nothing_but_what_was_set_aside_does_not_start_anew(begun: Path) -> None:
    root = begun / "run/checkpoints"
    for folder in list(root.glob("step-*")):
        folder.rename(root / f"abandoned-{without_digits(folder.name)}")
    (sentence,) = on_ranks(1, run, small_config(begun))
    names = "abandoned-step-00000003, abandoned-step-00000006"
    assert f"holds only {names}; name the one to continue from" in sentence
    with pytest.raises(CheckpointError, match=rf"but holds only orphaned ones \({names}\); name one of these\.$"):
        open_checkpoint(begun / "run")
    assert on_ranks(1, run, small_config(begun), str(root / "abandoned-step-00000003")) == ["finished"]
    assert sorted(path.name for path in root.glob("abandoned-*")) == [
        "abandoned-step-00000003",
        "abandoned-step-00000006",
    ]
    assert both(begun) == ([6], [])


def resumed_and_checked(group: Group, config: RunConfig) -> list[str]:
    """The files of which this rank read the checksum when the run resumed."""
    read: list[str] = []
    check_files = reading.check_files

    def noted(folder: Path, files: Mapping[str, FileEntry]) -> Iterator[None]:
        read.extend(files)
        yield from check_files(folder, files)

    reading.check_files = noted
    assert run(group, config) == "finished"
    return read


def test_ranks_share_the_reading_of_checksums_when_they_resume(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert on_ranks(2, run, small_config(tmp_path)) == ["finished"] * 2
    first, second = on_ranks(2, resumed_and_checked, small_config(tmp_path, {"training.steps": 7}))
    assert len(first) == len(second) == 1
    assert first != second


def test_nodes_may_have_the_folder_at_paths_of_their_own(begun: Path) -> None:
    """What they resume by `auto` and by `--resume`, and what they begin from; no node can open the other's path."""
    nodes = [begun / f"node-{rank}" for rank in range(2)]
    nodes[0].mkdir()
    nodes[1].symlink_to(nodes[0])
    shutil.move(begun / "run", nodes[0] / "run")

    def go_on(group: Group, name: str, resume: str = "", **changes: Any) -> str:
        own, other = nodes[group.rank], nodes[1 - group.rank]

        def open_own(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).startswith(str(other)):
                raise FileNotFoundError(arguments[0])

        sys.addaudithook(open_own)
        if "init" in changes:
            changes["init"]["from_checkpoint"] = str(own / "run")
        config = small_config(begun, {"output_dir": str(own / name), **changes})
        return run(group, config, str(own / resume) if resume else "auto")

    longer = {"training.steps": 9}
    assert on_ranks(2, partial(go_on, name="run", **longer)) == ["finished"] * 2
    assert on_ranks(2, partial(go_on, name="named", resume="run/checkpoints/3")) == ["finished"] * 2
    assert on_ranks(2, partial(go_on, name="begun", init={"mode": "continue"})) == ["finished"] * 2
    sessions = {name: read_metrics(nodes[0] / name).events[-1]["session"] for name in ("run", "named", "begun")}
    assert all(session["damaged"] == [] for session in sessions.values())
    assert sessions["run"]["resumed"].startswith("step-00000006")
    assert "step-00000003" in sessions["named"]["resumed"]
