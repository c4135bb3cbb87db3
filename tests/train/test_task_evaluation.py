"""Tasks in the middle of training: shared out over ranks, as a later evaluation finds them, without a trace."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megahead.config.run import RunConfig
from megahead.config.training import TasksConfig
from megahead.data.train_tokenizer import train_wordpiece
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import ConfigErrors, FieldError
from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.harness_tasks import task_files
from megahead.evaluate.results import TaskResult
from megahead.hf.export import ensure_hf_folder
from megahead.report.read import read_metrics
from megahead.train.faults import StopRequest
from megahead.train.log import RunLog
from megahead.train.loop import TaskEvaluation
from megahead.train.run import pretrain
from megahead.train.saving import Checkpointer
from support.long import long
from support.on_ranks import on_ranks
from support.small_checkpoint import save_tokenizer
from support.small_run import small_config, write_text

PASSAGES = ["the cat sat on the mat and the dog saw the cat", "the dog sat on the cat", "on the mat sat the dog"]
QUESTION = {"support": "the cat sat", "question": "who", "distractor1": "the dog", "distractor2": "the mat"}
PAIR = {"sentence_good": "the cat sat", "sentence_bad": "the cat cat", "field": "syntax", "UID": "one"}
NAMES = ("lambada_openai", "sciq", "blimp", "cloze", "bits_per_byte")


def config_of(folder: Path, name: str, tasks: dict[str, Any] | None) -> RunConfig:
    changes = {"model.vocab_size": 300, "model.max_positions": 64, "data.tokenizer": str(folder / "tokenizer.json")}
    return small_config(folder, {**changes, "output_dir": str(folder / name), "tasks": tasks})


def write_data(folder: Path) -> Path:
    write_text(folder)
    save_tokenizer(folder / "tokenizer.json")
    rows = {
        "lambada/lambada_test.jsonl": [{"text": text} for text in PASSAGES],
        "eval/sciq/validation.jsonl": [{**QUESTION, "distractor3": "a dog", "correct_answer": "the cat"}] * 2,
        "eval/blimp/one.jsonl": [PAIR, {**PAIR, "sentence_bad": "cat the sat"}, {**PAIR, "sentence_bad": "sat"}],
    }
    for name, examples in rows.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("".join(json.dumps(example) + "\n" for example in examples))
    return folder


def run(group: Group, config: RunConfig) -> str:
    return pretrain(config, Launch()).ending


def test_two_ranks_share_the_tasks_and_the_training_does_not_notice(tmp_path: Path) -> None:
    passages = str(write_data(tmp_path) / "lambada/lambada_test.jsonl")
    tasks = {"names": NAMES, "data": str(tmp_path), "cloze": passages, "text": passages, "every": 6}
    on_ranks(2, run, config_of(tmp_path, "with", tasks))
    on_ranks(2, run, config_of(tmp_path, "without", None))
    mine, plain = read_metrics(tmp_path / "with"), read_metrics(tmp_path / "without")
    assert [record["loss"] for record in mine.training] == [record["loss"] for record in plain.training]
    assert [record["step"] for record in mine.tasks] == [6]
    assert plain.tasks == []
    files = task_files(NAMES, tmp_path, Path(passages), Path(passages))
    later = list(evaluate_tasks(ensure_hf_folder(tmp_path / "with"), files))
    logged = mine.tasks[-1]["tasks"]
    assert list(logged) == list(NAMES)
    assert [task.task for task in later] == list(NAMES)
    for task in later:
        assert task.scores
        for score in task.scores:
            assert logged[task.task][score.metric]["value"] == pytest.approx(score.value, rel=1e-6)
    board = EventAccumulator(str(tmp_path / "with" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("tasks/sciq/acc")] == [6]
    assert [event.step for event in board.Scalars("tasks/blimp/acc_syntax")] == [6]
    assert not (tmp_path / "with/exports/evaluated").exists()


def killed(group: Group, config: RunConfig) -> str:
    def stop(*_: Any) -> list[TaskResult]:
        raise RuntimeError("killed")

    TaskEvaluation.run = stop  # type: ignore[method-assign] # in a process of its own
    return run(group, config)


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 6]), long(6, [6]), (9, [6])])
def test_the_next_session_evaluates_tasks_that_a_killed_one_owes_and_no_later_one_does(
    tmp_path: Path, every: int, steps: list[int]
) -> None:
    config = config_of(tmp_path, "run", {"names": ["blimp"], "data": str(write_data(tmp_path)), "every": every})
    with pytest.raises(AssertionError, match="killed"):
        on_ranks(2, killed, config)
    for _ in range(2):
        assert on_ranks(2, run, config) == ["finished", "finished"]
        log = (tmp_path / "run/metrics.jsonl").read_text()
        assert [record["step"] for record in map(json.loads, log.splitlines()) if "tasks" in record] == steps


def signalled(group: Group, config: RunConfig) -> str:
    begin = StopRequest.__init__

    def told(request: StopRequest, prints: bool = True) -> None:
        begin(request, prints)
        request.signal = "SIGTERM"

    StopRequest.__init__ = told  # type: ignore[method-assign] # in a process of its own
    return killed(group, config)


def test_a_session_that_is_told_to_stop_does_not_make_up_for_tasks_and_a_run_may_be_without_them(
    tmp_path: Path,
) -> None:
    tasks = {"names": ["blimp"], "data": str(write_data(tmp_path)), "every": 4}
    with pytest.raises(AssertionError, match="killed"):
        on_ranks(1, killed, config_of(tmp_path, "run", tasks))
    assert on_ranks(1, signalled, config_of(tmp_path, "run", tasks)) == ["stopped"]
    assert on_ranks(1, killed, config_of(tmp_path, "run", None)) == ["finished"]


def signalled_while_it_saves(group: Group, config: RunConfig) -> str:
    save = Checkpointer.save

    def saved(checkpointer: Checkpointer) -> float:
        if checkpointer._progress.state.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return save(checkpointer)

    Checkpointer.save = saved  # type: ignore[method-assign] # in a process of its own
    return killed(group, config)


def test_tasks_that_a_signal_comes_before_are_left_to_the_next_session(tmp_path: Path) -> None:
    tasks = {"names": ["blimp"], "data": str(write_data(tmp_path)), "every": 4}
    config = config_of(tmp_path, "run", tasks)
    assert on_ranks(2, signalled_while_it_saves, config) == ["stopped", "stopped"]
    assert on_ranks(2, run, config) == ["finished", "finished"]
    assert [record["step"] for record in read_metrics(tmp_path / "run").tasks] == [4, 6]


def test_results_that_a_session_or_a_rollback_went_behind_are_owed_again(tmp_path: Path) -> None:
    def has(*later: dict[str, Any]) -> bool:
        lines = [{"step": 4, "tasks": {"blimp": {}}}, {"step": 6, "loss": 1.0}, *later]
        (tmp_path / "metrics.jsonl").write_text("".join(orjson.dumps(line).decode() + "\n" for line in lines))
        log = RunLog(tmp_path / "metrics.jsonl")
        found = log.has_task_results(4)
        log.close()
        return found

    assert has()
    assert has({"step": 4, "session": {"continues": 4}})
    assert not has({"step": 3, "session": {"continues": 3}})
    assert not has({"step": 2, "rollback": {}})
    assert has({"step": 2, "rollback": {}}, {"step": 4, "tasks": {"blimp": {}}})


def test_mistakes_are_told_before_training(tmp_path: Path) -> None:
    tasks = {"names": NAMES[:3], "data": str(write_data(tmp_path)), "every": 4}
    with pytest.raises(ConfigErrors, match=r"`data\.tokenizer` must name the tokenizer"):
        small_config(tmp_path, {"tasks": tasks})
    (tmp_path / "eval/sciq/validation.jsonl").unlink()
    with pytest.raises(AssertionError, match=r"DataError: .*must hold eval/sciq/validation\.jsonl for task sciq"):
        on_ranks(1, run, config_of(tmp_path, "broken", tasks))
    assert not list((tmp_path / "broken").rglob("step-*"))
    for names, field in ((["cloze"], "cloze"), (["bits_per_byte"], "text"), (["blimp"], "data"), (["race!"], "names")):
        with pytest.raises(FieldError, match=rf"`tasks\.{field}` must name"):
            TaskEvaluation(TasksConfig(names=names, every=4), Group(), is_encoder=False)
    with pytest.raises(FieldError, match=r"`tasks\.names` must name tasks of blimp, .* for an encoder, but is sciq"):
        TaskEvaluation(TasksConfig(names=["sciq"], data=str(tmp_path), every=4), Group(), is_encoder=True)
    with pytest.raises(FieldError, match=r"`tasks\.names` must name tasks of .*sciq.* for a decoder, but is stsb"):
        TaskEvaluation(TasksConfig(names=["stsb"], data=str(tmp_path), every=4), Group(), is_encoder=False)


def test_an_encoders_grammar_along_training(tmp_path: Path) -> None:
    write_data(tmp_path)
    train_wordpiece([" ".join(PASSAGES)] * 3, 61).save(str(tmp_path / "tokenizer.json"))
    model = {"family": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 61}
    masking = {"mask_token": 4, "cls_token": 2, "sep_token": 3}
    changes = {"model": model, "masking": masking, "output_dir": str(tmp_path / "encoder")}
    changes |= {"data.isolate_documents": False, "data.boundary_targets": True}
    tasks = {"names": ["blimp"], "data": str(tmp_path), "every": 6}
    config = small_config(tmp_path, {**changes, "data.tokenizer": str(tmp_path / "tokenizer.json"), "tasks": tasks})
    on_ranks(1, run, config)
    (record,) = read_metrics(tmp_path / "encoder").tasks
    (task,) = evaluate_tasks(ensure_hf_folder(tmp_path / "encoder"), task_files(["blimp"], tmp_path))
    assert record["tasks"]["blimp"]["acc"]["value"] == pytest.approx(task.scores[0].value)
