"""Contrastive tuning equals its formula and one process, learns what can be learnt, and saves what it reports."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from megahead.commands import finetune
from megahead.distributed.group import Group
from megahead.errors import DataError, FieldError
from megahead.evaluate.contrastive_tuning import ContrastiveModel, epoch_batches, tokenize_pairs
from megahead.evaluate.finetuning import train_epochs
from megahead.evaluate.glue_tasks import Example
from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.harness_tasks import task_files
from megahead.evaluate.retrieval import TextEncoder
from megahead.evaluate.search_data import ContrastiveSettings
from megahead.hf.other_programs import read_pooling
from support.on_ranks import on_ranks
from support.small_encoder import save_small_encoder

WORDS = ("cat", "dog", "mat", "rain", "animals", "cats", "sat", "run", "saw", "true")
BATCH = [
    Example("cat", ("the cat sat", "it is no mat"), 0),
    Example("dog", ("the dog saw it",), 0),
    Example("rain", ("animals run away from rain", "the cat sat", "the dog saw it"), 0),
    Example("mat", ("the mat",), 0),
    Example("the cat", ("the cat sat",), 0),  # an answer of two queries is one candidate
    Example("animals", ("animals run",), 0),
]
SETTINGS = ContrastiveSettings(learning_rate=3e-3, batch_size=6, epochs=1, temperature=0.1, max_length=16)


def reference_loss(model: ContrastiveModel, encoder: TextEncoder) -> torch.Tensor:
    texts = list(dict.fromkeys(text for pair in BATCH for text in pair.second_texts))
    vectors = {text: encoder.pool(encoder.tokenize([text]))["mean"][0] for text in texts}
    losses = []
    for pair in BATCH:
        query = encoder.pool(encoder.tokenize([pair.first_text]))["mean"][0]
        logits = torch.stack([query @ vectors[text] for text in texts]) / model.temperature.log_value.exp()
        losses.append(F.cross_entropy(logits, torch.tensor(texts.index(pair.second_texts[0]))))
    return torch.stack(losses).mean()


def test_the_loss_is_its_formula(tmp_path: Path) -> None:
    encoder = TextEncoder(save_small_encoder(tmp_path / "model", dropout=0.0))
    model = ContrastiveModel(encoder, tokenize_pairs(encoder, BATCH), SETTINGS, Group())
    gradients = []
    for loss in (model.loss(BATCH), reference_loss(model, encoder)):
        model.zero_grad()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(model.loss(BATCH), reference_loss(model, encoder), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def tuned(group: Group, folder: Path) -> dict[str, Any]:
    """Loss and gradients of a batch; the mean loss of three steps, and the weights after them."""
    encoder = TextEncoder(folder)
    model = ContrastiveModel(encoder, tokenize_pairs(encoder, BATCH), SETTINGS, group)
    loss = model.loss(BATCH)
    loss.backward()
    gradients = [group.all_reduce_(p.grad.clone()) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    epochs = train_epochs(model, lambda: [BATCH] * 3, 3, model.loss, dict, SETTINGS, group)
    mean_loss, weights = next(epochs).loss, [p.detach() for p in model.parameters()]
    return {"loss": group.all_reduce_(loss.detach()), "gradients": gradients, "mean": mean_loss, "weights": weights}


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_equal_one_process(tmp_path: Path, count: int) -> None:
    """Ranks have different numbers of pairs and texts."""
    folder = save_small_encoder(tmp_path / "model", dropout=0.0)
    expected = tuned(Group(), folder)
    weights = expected.pop("weights")
    for result in on_ranks(count, tuned, folder):
        torch.testing.assert_close(result.pop("weights"), weights, rtol=0, atol=3e-4)  # of steps of up to 3e-3
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_by_classes_is_refused_and_results_that_are_stored_with_the_other_are_found() -> None:
    with pytest.raises(TypeError, match="loss"):
        ContrastiveSettings(loss="balanced")  # type: ignore[call-arg]
    assert asdict(SETTINGS)["loss"] == "regular"


def test_no_query_is_twice_in_an_epoch() -> None:
    pairs = [Example(f"q{k % 25}", (f"p{k}",), 0) for k in range(60)]
    epochs = [list(epoch_batches(pairs, 8, torch.Generator().manual_seed(seed))) for seed in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert sorted(map(len, epochs[0])) == [6, 6, 6, 7]
    assert sorted(pair.first_text for batch in epochs[0] for pair in batch) == sorted({f"q{k}" for k in range(25)})


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["finetune.py", *map(str, arguments)])
    finetune.main()


def write_pairs(file: Path, count: int, words: int = 10) -> Path:
    texts = [f"{WORDS[k % words]} and {WORDS[k // words % words]}" for k in range(count)]
    rows = [
        {"query": f"{text} it is", "positive": f"the {text} " + "rain " * (30 * (k == 0))}
        for k, text in enumerate(texts)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_tuned_encoder_is_saved_and_scores_as_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model, pairs = save_small_encoder(tmp_path / "model"), write_pairs(tmp_path / "pairs.jsonl", 100)
    arguments = ["--model", model, "--task", f"retrieval/{pairs}", "--output", tmp_path / "scores.json", "--seeds", 1]
    chosen = ["--epochs", 4, "--batch-size", 30, "--learning-rate", 0.01, "--max-length", 24]
    run(monkeypatch, *arguments, *chosen, "--save", tmp_path / "tuned")
    output = capsys.readouterr().out
    assert ": 1 text longer than 24 tokens, and truncated" in output
    assert "recall@100" in output
    run(monkeypatch, *arguments, *chosen, "--save", tmp_path / "again")  # results alone are no model
    assert read_pooling(tmp_path / "again") == "mean"
    (entry,) = json.loads((tmp_path / "scores.json").read_text())["results"]
    best = entry["epochs"][entry["best_epoch"] - 1]["scores"]["pairs.jsonl"]
    assert entry["epochs"][-1]["loss"] < entry["epochs"][0]["loss"] / 2
    held_out = [json.loads(line) for line in pairs.read_text().splitlines()][9::10]
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (scored,) = evaluate_tasks(tmp_path / "tuned", task_files(["retrieval"], articles=tmp_path / "held-out.jsonl"))
    scores = {score.metric: score.value for score in scored.scores}
    assert read_pooling(tmp_path / "tuned") == "mean"
    assert {metric: scores[f"mean_{metric}"] for metric in best} == pytest.approx(best)
    with pytest.raises(FieldError, match="`--save` must name a new folder"):
        run(monkeypatch, *arguments, "--save", tmp_path / "tuned")


def tune_by_command(group: Group, model: Path, pairs: Path, folder: Path) -> str:
    """What this rank printed."""
    out, options = folder / f"of-{group.size}", ["--seeds", 1, "--epochs", 2, "--learning-rate", 0.01]
    arguments = ["--model", model, "--task", f"retrieval/{pairs}", "--output", out / "scores.json", *options]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        run(patch, *arguments, "--save", out / "tuned")
    return printed.getvalue()


def test_the_command_on_two_ranks_equals_one_process(tmp_path: Path) -> None:
    model, pairs = save_small_encoder(tmp_path / "model", dropout=0.0), write_pairs(tmp_path / "pairs.jsonl", 40)
    for count in (1, 2):
        (tmp_path / f"of-{count}").mkdir()
    (one,) = on_ranks(1, tune_by_command, model, pairs, tmp_path)
    first, second = on_ranks(2, tune_by_command, model, pairs, tmp_path)
    assert "epoch 2/2" in one
    assert "epoch 2/2" in first
    assert not second
    alone, shared = (
        json.loads((tmp_path / f"of-{count}/scores.json").read_text())["results"][0]["epochs"] for count in (1, 2)
    )
    assert [epoch["loss"] for epoch in alone] == pytest.approx([epoch["loss"] for epoch in shared], rel=1e-3)
    weights = [load_file(tmp_path / f"of-{count}/tuned/model.safetensors") for count in (1, 2)]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=3e-3)  # of steps of up to 1e-2


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (["--seeds", 2, "--save", "F/new"], "`--save` must be given with one --model, one --task retrieval/PATH and"),
        (["--temperature", 0], "`--temperature` must be above 0"),
        (
            ["--task", "retrieval/nowhere", "--temperature", "nan"],
            "`--temperature` must be a finite number, but is nan",
        ),
        (
            ["--loss", "balanced"],
            "`--loss` must be left out with retrieval/PATH, which has no classes, but is balanced",
        ),
        (["--languages", "de"], "`--languages` must be left out without --task xnli, which alone reads it, but is de"),
        (
            ["--task", "glue/rte", "--pooling", "cls"],
            "`--pooling` must be left out without --task retrieval/PATH, which alone reads it, but is cls",
        ),
        (["--task", "glue/rte", "--temperature", 0.1], "`--temperature` must be left out without --task retrieval/"),
        (["--batch-size", 1], "must have at least two queries of a batch on each of 1 rank, but has"),
        (["--task", "retrieval/F/none.jsonl"], "none.jsonl` must be readable UTF-8 text, but is not"),
        (["--task", "retrieval/F/few.jsonl"], "must hold pairs of at least 10 queries, of which one is held out"),
        (["--task", "retrieval"], "must name tasks of glue/cola, .*, xnli/LANGUAGE, retrieval/PATH, but is retrieval"),
    ],
)
def test_mistakes_are_reported(
    tmp_path: Path, chosen: list[Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pairs = save_small_encoder(tmp_path / "model"), write_pairs(tmp_path / "pairs.jsonl", 30)
    write_pairs(tmp_path / "few.jsonl", 3)
    arguments = ["--model", model, "--task", f"retrieval/{pairs}", "--output", tmp_path / "scores.json"]
    with pytest.raises((FieldError, DataError), match=sentence):
        run(monkeypatch, *arguments, *(str(word).replace("F/", f"{tmp_path}/") for word in chosen))
