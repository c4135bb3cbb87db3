"""Fine-tuning equals transformers' own Trainer, learns what can be learnt, and goes on where it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from megahead.errors import CheckpointError, UserError
from megahead.evaluate import finetuning
from megahead.evaluate.finetuning import (
    EpochScores,
    ExampleEncoder,
    FineTuningRun,
    InitialModel,
    collate,
)
from megahead.evaluate.finetuning_comparison import Comparison, FineTuningResult, FineTuningResults, summarize
from megahead.evaluate.glue_tasks import TASKS, Example, TaskData, paper_settings
from megahead.hf.export import ensure_classifier_folder, ensure_hf_folder
from megahead.hf.loading import load_classifier, load_tokenizer_folder
from support.small_checkpoint import save_small, save_tokenizer, small_config
from support.small_encoder import save_small_encoder

WORDS = ("cat", "dog", "mat", "rain", "animals")
SETTINGS = paper_settings("glue/rte", learning_rate=3e-3, epochs=3, batch_size=16, max_length=24)


def same_word(rows: int = 160, task: str = "glue/rte") -> TaskData:
    """Whether the second text is about the first one's word, or says no."""
    words = [(WORDS[k % 5], "no" if k // 5 % 2 else WORDS[k % 5]) for k in range(rows)]
    examples = [Example(f"the {a} sat", (f"it is the {b}",), int(b == "no")) for a, b in words]
    return TaskData(task, TASKS[task], examples, {"rte": examples[:20]}, trains_on_dev=False)


def test_one_batch_an_epoch_equals_the_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout and with all rows in a batch nothing is drawn: the weights must be the same."""
    folder, data = save_small_encoder(tmp_path / "model", dropout=0.0), same_word(12)
    settings = replace(SETTINGS, loss="regular", weight_decay=0.1, batch_size=12, epochs=4, warmup=0.0)
    tokenizer = load_tokenizer_folder(folder)
    encoded = ExampleEncoder(tokenizer, settings.max_length).encode(data.train)
    torch.manual_seed(3)
    ours = load_classifier(folder, 2, tokenizer.pad_token_id)
    with monkeypatch.context() as patched:
        patched.setattr(finetuning, "load_classifier", lambda *_, **__: ours)
        unscored = replace(data, evaluation_sets={})
        list(FineTuningRun(InitialModel("small", folder), unscored, settings).run(0))

    def collated(rows: list[Any]) -> dict[str, torch.Tensor]:
        labels = torch.tensor([int(row.label) for row in rows])
        return {**collate(rows, tokenizer.pad_token_id, torch.device("cpu")), "labels": labels}

    torch.manual_seed(3)
    theirs = load_classifier(folder, 2, tokenizer.pad_token_id)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        num_train_epochs=4,
        per_device_train_batch_size=12,
        learning_rate=settings.learning_rate,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(theirs, arguments, data_collator=collated, train_dataset=encoded).train()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=2e-5, msg=name)


def test_the_rate_rises_over_its_share_of_all_steps_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr(finetuning, "set_learning_rate", lambda _, rate: rates.append(rate))
    settings = replace(SETTINGS, batch_size=12, epochs=3, warmup=0.4, learning_rate=6e-3)
    list(FineTuningRun(InitialModel("small", save_small_encoder(tmp_path / "model")), same_word(36), settings).run(0))
    assert rates == pytest.approx([1.5e-3, 3e-3, 4.5e-3, *[6e-3] * 6])  # four of nine steps


@pytest.mark.parametrize("kind", ["encoder", "gpt_neox", "llama", "modernbert"])
def test_what_can_be_learnt_is_learnt_and_the_same_seed_learns_the_same(tmp_path: Path, kind: str) -> None:
    if kind == "encoder":
        folder = save_small_encoder(tmp_path / "model", types=1)
    elif kind == "modernbert":
        save_small_encoder(tmp_path / "words")
        config = small_config(
            model={"family": "modernbert", "vocab_size": 120, "local_window": 8},
            masking={"mask_token": 4, "cls_token": 2, "sep_token": 3},
            data={"end_token": 3},
        )
        save_small(tmp_path / "run", config, scale=0.05)
        shutil.copyfile(tmp_path / "words/tokenizer.json", tmp_path / "run/tokenizer.json")
        folder = ensure_classifier_folder(tmp_path / "run")
        assert folder == ensure_hf_folder(tmp_path / "run")
    else:
        save_small(tmp_path / "run", small_config(model={"family": kind, "vocab_size": 300}), scale=0.05)
        save_tokenizer(tmp_path / "run" / "tokenizer.json")
        folder = ensure_classifier_folder(tmp_path / "run")
    task_run = FineTuningRun(InitialModel("small", folder), same_word(), SETTINGS)
    first, again, other = (list(task_run.run(seed)) for seed in (0, 0, 1))
    assert first[-1].scores["rte"]["accuracy"] == 1.0
    assert first[-1].loss < first[0].loss
    assert [epoch.loss for epoch in first] == [epoch.loss for epoch in again] != [epoch.loss for epoch in other]


def test_choices_and_numbers(tmp_path: Path) -> None:
    """The choice that says no is the right one; the number is how often it is said."""
    folder = save_small_encoder(tmp_path / "model")
    choices = [Example(f"the {WORDS[k % 5]}", ("it is", "no")[:: 1 - 2 * (k % 2)], 1 - k % 2) for k in range(100)]
    copa = TaskData("superglue/copa", TASKS["superglue/copa"], choices, {"copa": choices}, trains_on_dev=False)
    (*_, last) = FineTuningRun(InitialModel("small", folder), copa, SETTINGS).run(0)
    assert last.scores == {"copa": {"accuracy": 1.0}}
    numbers = [Example("the cat", (" ".join(["no"] * (k % 6)) or "it",), float(k % 6)) for k in range(100)]
    stsb = TaskData("glue/stsb", TASKS["glue/stsb"], numbers, {"stsb": numbers}, trains_on_dev=False)
    (*_, last) = FineTuningRun(InitialModel("small", folder), stsb, replace(SETTINGS, epochs=8)).run(0)
    assert last.scores["stsb"]["spearman"] > 0.8


def test_random_weights_share_only_the_shape(tmp_path: Path) -> None:
    folder = save_small_encoder(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"]
    for random_weights in (False, True):
        model = load_classifier(folder, 3, 0, random_weights=random_weights)
        assert model.classifier.weight.shape == (3, 32)
        assert torch.equal(model.bert.embeddings.word_embeddings.weight, stored) is not random_weights


def test_a_body_with_a_hole_is_refused(tmp_path: Path) -> None:
    folder = save_small_encoder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.attention.self.query.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"but lacks bert\.encoder\.layer\.1\.attention\.self\.query\.weight"):
        load_classifier(folder, 2, 0)


def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    task_run = FineTuningRun(InitialModel("small", save_small_encoder(tmp_path / "model")), same_word(32), SETTINGS)
    wild = FineTuningRun(task_run.initial_model, task_run.data, replace(SETTINGS, learning_rate=1e30))
    with pytest.raises(UserError, match="nan at step 2; lower --learning-rate"):
        list(wild.run(0))


def test_finished_runs_are_not_made_again_unless_something_changed(tmp_path: Path) -> None:
    initial_model, data = InitialModel("small", save_small_encoder(tmp_path / "model")), same_word(40)
    output = tmp_path / "scores.json"

    def run(seeds: int, data: TaskData = data, **changes: Any) -> tuple[list[FineTuningResult], list[str]]:
        lines: list[str] = []
        tasks = [(data, replace(SETTINGS, epochs=2, **changes))]
        return Comparison([initial_model], tasks, range(seeds), FineTuningResults(output)).run(lines.append), lines

    first, lines = run(1)
    assert len(lines) == 2
    assert lines[1].startswith("small: glue/rte, seed 0, epoch 2/2: loss ")
    assert lines[1].endswith("100% of all runs done, 0s left")
    both, lines = run(2)
    assert [result.seed for result in both] == [0, 1]
    assert (both[0], len(lines)) == (first[0], 2)
    assert run(2) == (both, [])
    assert len(run(1, learning_rate=1e-4)[1]) == 2
    assert len(run(1, same_word(39))[1]) == 2
    (folder := initial_model.folder / "config.json").write_text(folder.read_text() + "\n")
    assert len(run(1)[1]) == 2
    entries = json.loads(output.read_text())["results"]
    assert [entry["train_rows"] for entry in entries] == [40, 40, 40]


def result(task: str, seed: int, *scores: dict[str, dict[str, float]]) -> FineTuningResult:
    return FineTuningResult("m", task, seed, 10, False, [EpochScores(0.1, score, 1.0) for score in scores])


def test_summaries_take_the_best_epoch_then_seeds_then_tasks() -> None:
    cola = [
        result(
            "glue/cola", seed, {"cola": {"matthews": 0.1, "accuracy": 0.9}}, {"cola": {"matthews": m, "accuracy": 0.5}}
        )
        for seed, m in enumerate((0.2, 0.4))
    ]
    rte = [result("glue/rte", seed, {"rte": {"accuracy": 1.0}}) for seed in (0, 1)]
    mrpc = [result("glue/mrpc", seed, {"mrpc": {"accuracy": 0.6, "f1": 0.7}}) for seed in (0, 1)]
    rows = {(row.task, row.evaluation_set, row.metric): row for row in summarize([*cola, *rte, *mrpc])}
    assert rows["glue/cola", "cola", "accuracy"].values == [0.5, 0.5]
    matthews = rows["glue/cola", "cola", "matthews"]
    assert (matthews.epochs, matthews.mean()) == ([2, 2], pytest.approx(0.3))
    assert str(matthews) == "30.0 ± 14.1 (2 2)"
    assert rows["glue", "mean of 2", ""].values == pytest.approx([0.4, 0.5])  # without RTE, as in the paper
    reordered = summarize(
        [
            *cola,
            *reversed(mrpc[1:]),
            mrpc[0],
            result("glue/sst2", 1, {"sst2": {"accuracy": 0.0}}),
            result("glue/sst2", 0, {"sst2": {"accuracy": 0.9}}),
        ]
    )
    assert reordered[-1].values == pytest.approx([1.7 / 3, 1 / 3])  # of seeds 0 and 1, in whatever order they ran
    assert all(row.task != "glue" for row in summarize([*cola, mrpc[0]]))  # a seed of MRPC is still to run


def test_several_test_sets_have_a_mean_and_the_first_one_chooses_the_epoch() -> None:
    epochs = [{"fr": {"accuracy": a}, "de": {"accuracy": b}} for a, b in ((0.5, 0.9), (0.6, 0.4))]
    rows = {row.evaluation_set: row for row in summarize([result("xnli/fr", 0, *epochs)])}
    assert (rows["fr"].mean(), rows["de"].mean(), rows["mean of 2"].mean()) == (0.6, 0.4, 0.5)
    assert str(rows["fr"]) == "60.0 (2)"


def test_a_floor_is_of_one_shape(tmp_path: Path) -> None:
    kept, models = FineTuningResults(tmp_path / "scores.json"), []
    for name, types in (("one", 1), ("two", 2)):
        folder = save_small_encoder(tmp_path / name, types=types)
        models.append(InitialModel("random weights", folder, random_weights=True))
    first, second = models
    kept.add((first, same_word(), SETTINGS, 0), [EpochScores(0.5, {"rte": {"accuracy": 0.5}}, 1.0)])
    assert kept.find((first, same_word(), SETTINGS, 0)) is not None
    assert kept.find((second, same_word(), SETTINGS, 0)) is None
    (first.folder / "tokenizer.json").unlink()
    assert kept.find((first, same_word(), SETTINGS, 0)) is None  # loading it raises a CheckpointError


def test_a_text_is_cut_at_the_models_context(tmp_path: Path) -> None:
    folder = save_small_encoder(tmp_path / "model")
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    longest = " ".join(["the cat"] * positions)
    data = replace(same_word(), train=[Example("no", (longest,), 0), Example("it", (longest,), 1)])
    settings = replace(SETTINGS, max_length=2 * positions, epochs=1)
    (epoch,) = FineTuningRun(InitialModel("small", folder), data, settings).run(0)
    assert epoch.loss > 0
