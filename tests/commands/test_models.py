"""The commands over conversion, as a user types them."""

from __future__ import annotations

import io
import json
import runpy
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from matplotlib.figure import Figure

from megahead.commands.eval_harness import PAPER_TASKS, default_tasks
from megahead.data.train_tokenizer import train_wordpiece
from megahead.evaluate import harness
from megahead.hf.export import ensure_classifier_folder, export
from megahead.hf.settings import ExportOrigin, read_origin
from megahead.report import figures
from megahead.report.figures import draw_task_curves, run_names
from support.blimp import write_blimp
from support.named import folder_of
from support.small_checkpoint import save_small, save_tokenizer, small_config
from support.small_encoder import save_small_encoder

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    return tmp_path / "run"


def command(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> int:
    """Exit code of `tools/NAME.py ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
    return int(stopped.value.code or 0)


def test_out_and_in_again(run: Path, monkeypatch, capsys) -> None:
    out, back = run.parent / "out [v2]", run.parent / "back"
    assert command(monkeypatch, "convert", "to-hf", "--checkpoint", run, "--output", out, "--head", "tied") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"wrote {out} in ")
    assert "logits of 64 tokens equal the checkpoint's within" in printed
    assert command(monkeypatch, "convert", "from-hf", "--model", out, "--output", back) == 0
    assert (folder_of(back, 0) / "checkpoint.json").is_file()


def test_a_mistake_ends_with_a_sentence_and_code_2(run: Path, monkeypatch, capsys) -> None:
    out = run.parent / "out"
    assert command(monkeypatch, "convert", "to-hf", "--checkpoint", run, "--output", out, "--head", "trained") == 2
    assert "use pmi, tied or none" in capsys.readouterr().err
    export = ("to-hf", "--checkpoint", run, "--output", out, "--head", "tied")
    assert command(monkeypatch, "convert", *export, "--shard-size", "nan") == 2
    assert "`--shard-size` must be above 0" in capsys.readouterr().err


def test_the_same_seed_generates_the_same_text(run: Path, monkeypatch, capsys) -> None:
    def text(*options: object) -> str:
        arguments = ("--model", run, "--prompt", "the cat", "", "--max-new-tokens", 6, *options)
        assert command(monkeypatch, "generate", *arguments) == 0
        return capsys.readouterr().out

    first = text("--seed", 1)
    assert first.startswith("the cat")
    assert text("--seed", 1) == first != text("--seed", 2)
    greedy = text("--temperature", 0, "--seed", 1)
    assert greedy == text("--temperature", 0, "--seed", 2) == text("--temperature", 0, "--max-tokens", 6)


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    masking = {"mask_token": 4, "cls_token": 2, "sep_token": 3, "diffusion": True}
    model = {"family": "bert", "token_types": 2, "max_positions": 40}
    save_small(tmp_path / "run", small_config(model=model, data={"end_token": 3}, masking=masking))
    train_wordpiece(["the cat sat on the mat and the dog saw the cat"] * 10, 61).save(
        str(tmp_path / "run/tokenizer.json")
    )
    return tmp_path / "run"


def test_an_encoder_replaces_mask_tokens_after_a_prompt(encoder: Path, monkeypatch, capsys) -> None:
    def text(*options: object) -> str:
        arguments = ("--model", encoder, "--prompt", "the cat", "--max-new-tokens", 6, *options)
        assert command(monkeypatch, "generate", *arguments) == 0
        return capsys.readouterr().out

    first = text("--seed", 1)
    assert first.startswith("the cat")
    assert "[" not in first
    assert text("--seed", 1) == first != text("--seed", 2)
    assert text("--passes", 2, "--seed", 1) != first
    assert command(monkeypatch, "generate", "--model", encoder, "--prompt", "a", "--passes", 65) == 2
    assert "`--max-new-tokens` must leave 2 of the model's context (40)" in capsys.readouterr().err
    assert command(monkeypatch, "generate", "--model", encoder, "--prompt", "the cat " * 20, "--max-new-tokens", 6) == 0
    assert capsys.readouterr().err == "the prompt exceeds the context and lost its first 8 tokens\n"


def test_an_encoder_among_the_models_chooses_tasks_of_encoders(encoder: Path) -> None:
    decoder = encoder.parent / "decoder"
    save_small(decoder, small_config(model={"vocab_size": 300}))
    assert default_tasks([decoder]) == PAPER_TASKS
    assert default_tasks([decoder, encoder]) == "blimp"


def test_a_decoder_writes_a_token_a_pass(run: Path, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "generate", "--model", run, "--prompt", "a", "--passes", 3) == 2
    assert "`--passes` must be left out for a decoder" in capsys.readouterr().err


def test_prompts_come_from_a_file_or_from_the_keyboard(run: Path, monkeypatch, capsys) -> None:
    prompts = run.parent / "prompts.txt"
    prompts.write_text("the cat\nthe dog\n", encoding="utf-8-sig")
    options = ("--model", run, "--max-new-tokens", 5, "--temperature", 0)
    assert command(monkeypatch, "generate", *options, "--prompt", "the cat", "the dog") == 0
    answers = capsys.readouterr().out
    assert command(monkeypatch, "generate", *options, "--file", prompts) == 0
    assert capsys.readouterr().out == answers
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n/new\nthe dog\n\n"))
    assert command(monkeypatch, "generate", *options, "--interactive") == 0
    spoken = capsys.readouterr().out.replace("> ", "")
    assert spoken.split() == answers.replace("the cat", "", 1).replace("the dog", "", 1).split()


def test_what_was_said_stays_and_words_are_drawn_by_another_temperature(run: Path, monkeypatch, capsys) -> None:
    kept = run.parent / "kept.jsonl"
    typed = "the cat\n the dog\n/temperature 9\n/temperature\n/hot\n the cat\n/temperature -1\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n" + typed.encode()), "utf-8"))
    options = ("--model", run, "--max-new-tokens", 4, "--temperature", 0, "--output", kept)
    assert command(monkeypatch, "generate", *options, "--interactive") == 0
    first, second, third = (json.loads(line) for line in kept.read_text().splitlines())
    assert second["prompt"] == f"{first['prompt']}{first['text']} the dog"
    assert third["prompt"] == f"{second['prompt']}{second['text']} the cat"
    said = capsys.readouterr().out
    assert first["text"].strip() in said
    assert r"`a line` must be UTF-8 text, but is 'caf\udce9' instead." in said
    assert "`/temperature` must be followed by a number, but is nothing instead." in said
    assert "must be /new or /temperature X, but is /hot instead." in said
    assert "`--temperature` must be 0, or from 0.0001 on, but is -1.0 instead." in said


def test_an_empty_file_of_prompts_is_reported(run: Path, monkeypatch, capsys) -> None:
    (run.parent / "prompts.txt").touch()
    assert command(monkeypatch, "generate", "--model", run, "--file", run.parent / "prompts.txt") == 2
    assert "a prompt a line, but has none" in capsys.readouterr().err
    (run.parent / "prompts.txt").write_text("caf\xe9", encoding="latin-1")
    assert command(monkeypatch, "generate", "--model", run, "--file", run.parent / "prompts.txt") == 2
    assert "must be readable UTF-8 text, but is not" in capsys.readouterr().err


def test_where_samples_go_is_tried_before_the_model_is_loaded(run: Path, monkeypatch, capsys) -> None:
    options = ("generate", "--model", run, "--prompt", "a", "--max-new-tokens", 1, "--output")
    assert command(monkeypatch, *options, run.parent) == 2
    captured = capsys.readouterr()
    assert f"`{run.parent}` must be writable" in captured.err
    assert captured.out == ""
    assert command(monkeypatch, *options, run.parent / "new" / "samples.jsonl") == 0
    assert (run.parent / "new" / "samples.jsonl").read_text().count("\n") == 1


def test_a_backbone_alone_says_how_it_gets_a_head(run: Path, monkeypatch, capsys) -> None:
    folder = export(run, run.parent / "bare", "none").folder
    assert command(monkeypatch, "generate", "--model", folder, "--prompt", "a") == 2
    assert "is a backbone alone; export its checkpoint with --head pmi" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--temperature", -1, "be 0, or from 0.0001 on"),
        ("--temperature", "nan", "be 0, or from 0.0001 on"),
        ("--seed", 2**64, "be from 0 to 2^63 - 1"),
        ("--top-p", 0, "above 0"),
        ("--top-k", -3, "at least 0"),
        ("--max-new-tokens", 2048, "below the model's context (2048)"),
        ("--max-new-tokens", 0, "at least 1"),
    ],
)
def test_options_out_of_range_are_reported(run: Path, monkeypatch, capsys, option, value, sentence) -> None:
    assert command(monkeypatch, "generate", "--model", run, "--prompt", "a", option, value) == 2
    assert sentence in capsys.readouterr().err


def test_scores_are_printed_kept_and_not_computed_twice(run: Path, monkeypatch, capsys) -> None:
    passages, scores = run.parent / "cloze.jsonl", run.parent / "scores.json"
    passages.write_text('{"text": "the cat saw the dog"}\n' * 3)
    arguments = ("--model", run, "--tasks", "cloze", "--cloze", passages, "--output", scores)
    assert command(monkeypatch, "eval_harness", *arguments) == 0
    first = capsys.readouterr().out
    assert "perplexity" in first
    (entry,) = json.loads(scores.read_text())["results"]
    assert (entry["model"], entry["task"], entry["samples"]) == (str(run), "cloze", 3)
    monkeypatch.setattr(harness, "open_language_model", None)
    assert command(monkeypatch, "eval_harness", *arguments) == 0
    assert capsys.readouterr().out == first


def write_entailment(data: Path) -> None:
    (data / "glue/RTE").mkdir(parents=True)
    rows = "7\tthe cat sat\tit is true\tentailment\n8\tthe dog\tno\tnot_entailment\n" * 4
    for split in ("train", "dev"):
        (data / f"glue/RTE/{split}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + rows)


def test_fine_tuned_checkpoints_are_a_curve_over_tokens_and_hours(run: Path, monkeypatch, capsys) -> None:
    write_entailment(run.parent / "data")
    origin = read_origin(ensure_classifier_folder(run))
    log = {"step": 1, "tokens": origin.tokens, "seconds": 1800.0, "loss": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(log) + "\n" + json.dumps(log | {"step": 2, "tokens": 10**9}) + "\n")
    seen: dict[str, Any] = {}

    def draw(points: list[figures.TaskPoint], **more: Any) -> Figure:
        seen.update(more, points=points)
        return draw_task_curves(points, **more)

    monkeypatch.setattr(figures, "draw_task_curves", draw)
    png, output = run.parent / "rte.png", run.parent / "tuned.json"
    options = ("--data", run.parent / "data", "--output", output, "--seeds", 2, "--epochs", 1, "--floor")
    assert command(monkeypatch, "finetune", "--model", run, "--task", "glue/rte", *options, "--curve", png) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    entries = json.loads(output.read_text())["results"]
    scores = [entry["epochs"][0]["scores"]["rte"]["accuracy"] for entry in entries]
    (point,) = (point for point in seen["points"] if point.metric == "accuracy")
    assert point[:4] == (origin.run, origin.tokens, "glue/rte", "accuracy")
    assert point[4:] == (fmean(scores[:2]), stdev(scores[:2]) / 2**0.5, 0.5)
    assert seen["random_scores"]["glue/rte", "accuracy"] == fmean(scores[2:])


def test_encoders_have_tasks_of_their_own_without_any_named(run: Path, monkeypatch, capsys) -> None:
    from transformers import BertConfig, BertForMaskedLM

    encoder, scores = save_small_encoder(run.parent / "encoder"), run.parent / "scores.json"
    BertForMaskedLM(BertConfig.from_pretrained(encoder)).save_pretrained(encoder)
    write_blimp(run.parent / "data/eval/blimp", {("one", "syntax"): [("the cat sat", "the dog sat")] * 2})
    arguments = ("--data", run.parent / "data", "--output", scores)
    assert command(monkeypatch, "eval_harness", "--model", encoder, *arguments) == 0
    assert {entry["task"] for entry in json.loads(scores.read_text())["results"]} == {"blimp"}
    assert command(monkeypatch, "eval_harness", "--model", run, *arguments) == 2
    assert "lambada_test.jsonl for task lambada_openai" in capsys.readouterr().err


def test_runs_that_share_a_name_are_lines_of_their_own_on_a_curve(tmp_path: Path) -> None:
    step = "checkpoints/step-00000001"
    folders = {tmp_path / run / step: tmp_path / run / "exports" / "step-1-pmi" for run in ("a", "b", "c")}
    elsewhere = tmp_path / "published"
    origins = dict(zip(folders, map(ExportOrigin, ("same", "same", "other"), (1, 1, 1)), strict=True))
    named = run_names({**origins, elsewhere: ExportOrigin("other", 9)}, {**folders, elsewhere: elsewhere})
    assert named == [str(tmp_path / "a"), str(tmp_path / "b"), "other", "other"]
