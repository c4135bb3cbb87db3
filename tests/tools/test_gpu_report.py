"""The measurement on a GPU: a dry run of all its parts, what they are, what they read, and what their numbers say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gpu_report import (
    DRY,
    DRY_RUN,
    FULL,
    RESULT,
    STARTUP_SECONDS,
    TOKENS,
    TRAINING_MFU,
    Outcome,
    PartRunner,
    build_parts,
    step_rows,
    training_rows,
    whole_rows,
    write_zipf,
)

from megahead.config.loading import load_config
from megahead.config.plan import RunPlan
from megahead.data.preprocess import preprocess
from megahead.data.writer import IndexedDatasetWriter
from megahead.estimate import run_flops
from megahead.train.step import peak_flops
from support.forked import Script, run_script
from support.gpu_parts import line, quiet
from support.small_checkpoint import save_tokenizer


def forked(command: Sequence[str], said: Path, wrong: Path, limit: float) -> int:
    """A part's process, forked from this one, which has imported everything already."""
    done = Script(*command).done(limit)
    said.write_text(done.stdout)
    wrong.write_text(done.stderr)
    return done.returncode


@pytest.mark.slow
def test_all_parts_run_tiny_on_the_cpu(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "t.json")
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "the cat saw the dog and the dog saw the cat"}\n' * 400)
    preprocess([source], tmp_path / "t.json", tmp_path / "text", holdout=200)
    parts = build_parts(DRY, tmp_path / "out", tmp_path / "text")
    PartRunner(tmp_path / "out", quiet(), title=DRY_RUN, launch=forked).run_parts(parts, 600)
    report = json.loads((tmp_path / "out/report.json").read_text())
    states = {part["name"]: (part["state"], part["why"]) for part in report["parts"]}
    assert "operation" in next(part["said"] for part in report["parts"] if part["name"] == "profile-decoder")
    assert states.pop("waits-1") == ("failed", "the machine must have a CUDA device to count waits on, but has none.")
    assert states == dict.fromkeys([part.name for part in parts if part.name != "waits-1"], ("measured", ""))
    lines = {part["name"]: part["lines"] for part in report["parts"]}
    assert {line["form"] for line in lines["loss"]} >= {"ours", "paper"}
    assert [line["objective"] for line in lines["step-encoder"]] == ["headless", "vanilla"]
    assert len(lines["launches"]) == 2  # without a device there is no graph
    assert [line[""] for line in lines["engine"]] == ["bare torch", "ZeRO 1"]
    page = (tmp_path / "out/report.md").read_text()
    assert page.startswith("# A dry run on a CPU: no number here says anything about a GPU\n")
    assert "$ python tools/bench_loss.py --sizes 64" in page
    assert RESULT not in page
    (whole, _), (row,) = (rows(tmp_path / "out", [*states]) for rows in (whole_rows, training_rows))
    assert (whole["steps"], whole["vanilla takes"].endswith("times as long")) == ("tiny-headless", True)
    assert row["model"] == "tiny"
    assert row["headless after these tokens"] > 1


def test_parts_in_full_are_those_of_the_dry_run_in_other_sizes(tmp_path: Path) -> None:
    """And their commands' options exist."""
    full, dry = (build_parts(scale, tmp_path) for scale in (FULL, DRY))
    assert [part.command[0] for part in full if part.command[0] not in {one.command[0] for one in dry}] == [
        "-m"  # pytest
    ]
    assert len({part.name for part in full}) == len(full)
    for name in ("tools/bench_loss.py", "tools/bench_step.py", "tools/bench_engine.py", "tools/profile_step.py"):
        told = run_script(name, "--help").stdout
        used = {word for part in full if part.command[0] == name for word in part.command if word.startswith("--")}
        assert used
        assert not [word for word in used if word not in told]
    assert all(part.unsupported_reason for part in full if part.name.startswith("train-"))
    for part in full:
        words = list(part.command)
        if "--config" in words and "train-" not in part.name:
            changes = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
            plan = RunPlan.of(load_config(words[words.index("--config") + 1], changes), 1, "cuda")
            assert plan.uses_cuda_graphs() == part.name.endswith("-graphs")


def test_all_parts_fit_into_the_minutes_and_trainings_have_time_for_their_tokens(tmp_path: Path) -> None:
    parts = build_parts(FULL, tmp_path, tmp_path / "text")
    assert sum(part.seconds for part in parts) <= 45 * 60
    base = ["data.train=''", "data.validation=null", "data.tokenizer=null", "batch.global_size=64"]
    trainings = {part.name: part.seconds for part in parts if part.uses_spare_time}
    assert len(trainings) == 4
    for vocabulary, name in ((50_277, "70m"), (131_072, "70m-131k")):
        for objective, candidates in (("headless", 9_000), ("vanilla", vocabulary)):
            changes = [*base, "model.size=pythia-70m", f"model.vocab_size={vocabulary}"]
            config = load_config("configs/pythia-70m-headless.yaml", [*changes, f'objective={{"name":"{objective}"}}'])
            a_token = run_flops(config, candidates).total
            seconds = TOKENS * a_token / (TRAINING_MFU * (peak_flops("NVIDIA H100", "bf16") or 0))
            assert trainings[f"train-{name}-{objective}"] >= STARTUP_SECONDS + seconds


def test_without_a_text_one_is_drawn_that_needs_no_training(tmp_path: Path) -> None:
    index = tmp_path / "zipf.idx"
    write_zipf(tmp_path / "zipf", 20_000)
    before = index.stat().st_mtime_ns
    write_zipf(tmp_path / "zipf", 20_000)
    assert index.stat().st_mtime_ns == before
    reasons = {part.unsupported_reason for part in build_parts(FULL, tmp_path) if part.name.startswith("train-")}
    assert reasons == {"a text must be given for it by --dataset, but is not."}


def test_a_dataset_that_is_there_is_trained_on_without_a_tokenizer(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "small", vocab_size=60) as writer:
        writer.add_document([5, 6, 0])
    parts = build_parts(FULL, tmp_path, tmp_path / "small")
    assert {part.unsupported_reason for part in parts} == {""}
    (train,) = (part.command for part in parts if part.name == "train-70m-headless")
    assert f"data.validation={tmp_path}/small-validation" in train
    assert "data.tokenizer=null" in train


def test_the_command_lists_its_parts_and_refuses_others(tmp_path: Path) -> None:
    told = run_script("tools/gpu_report.py", "--list").stdout
    assert [word in told for word in ("step-410m", "waits-3", "train-70m-vanilla")] == [True] * 3
    refused = run_script("tools/gpu_report.py", "--only", "step-9b", "--folder", tmp_path / "x")
    assert refused.returncode == 2
    assert refused.stderr == "error: `--only` must name parts that --list has, but is step-9b instead.\n"
    assert not (tmp_path / "x").exists()


def test_steps_are_compared_with_what_operations_alone_would_give() -> None:
    lines = [line("headless", 10, 100), line("vanilla", 30, 400), line("headless, compiled", 8, 100)]
    outcome = Outcome("step-70m", "what?", [], "measured", lines=[*lines, line("vanilla, compiled", 24, 400)])
    plain, compiled = step_rows([outcome, Outcome("other", "", [], "failed")])
    assert (plain["part"], plain["times as fast"], plain["by operations"], plain["of it"]) == ("step-70m", 3, 4, "75%")
    assert (compiled["part"], compiled["headless, ms"], compiled["MFU"]) == ("step-70m, compiled", 8, "41.0%")


def log(folder: Path, name: str, seconds_a_step: float, steps: int, perplexity: Callable[[int], float]) -> None:
    path = folder / "runs" / name / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    records = []
    for step in range(1, steps + 1):
        where = {"step": step, "tokens": step * 100, "seconds": step * seconds_a_step}
        records += [where | {"loss": 1.0}, where | {"validation": {"perplexity": perplexity(step)}}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_trainings_are_compared_at_equal_tokens_and_in_equal_time(tmp_path: Path) -> None:
    log(tmp_path, "train-x-headless", 1.0, 8, lambda step: 2.0 ** (10 - step))
    log(tmp_path, "train-x-vanilla", 4.0, 3, lambda step: 2.0 ** (12 - step))
    (row,) = training_rows(tmp_path, ["train-x-headless", "train-x-vanilla", "loss"])
    assert row["headless after these tokens"] == pytest.approx(2.0**7)  # 3 steps
    assert row["vanilla after these tokens"] == pytest.approx(2.0**9)
    assert row["headless after these seconds"] == pytest.approx(2.0**2)  # 8 seconds
    assert row["vanilla after these seconds"] == pytest.approx(2.0**10)  # 2 steps
    assert (row["headless, tokens/s"], row["vanilla, tokens/s"]) == (100, 25)
    assert training_rows(tmp_path, ["train-x-headless"]) == []
