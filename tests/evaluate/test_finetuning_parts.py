"""Joining, batching, losses and metrics of fine-tuning against their slow or well-known forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megahead.errors import FieldError
from megahead.evaluate.finetuning import ExampleEncoder, class_loss, collate, compute_metric, training_batches
from megahead.evaluate.glue_tasks import Example, paper_settings
from megahead.hf.loading import load_tokenizer_folder
from support.small_encoder import save_small_encoder

PAIRS = [
    ("the cat sat", "it is true"),
    ("the cat sat on the mat and the dog saw it " * 2, "no"),
    ("yes", "the dog saw that animals run away from rain " * 2),
    ("the cat sat on the mat and the dog", "animals run away from rain that the cat saw"),
    ("the cat", None),
    ("the dog saw that animals run away from rain " * 2, None),
]


@pytest.mark.parametrize("max_length", [8, 9, 16, 40])
def test_texts_are_joined_and_cut_as_the_tokenizer_does(tmp_path: Path, max_length: int) -> None:
    tokenizer = load_tokenizer_folder(save_small_encoder(tmp_path / "model"))
    encoded = ExampleEncoder(tokenizer, max_length).encode([Example(first, (second,), 0) for first, second in PAIRS])
    for (first, second), example in zip(PAIRS, encoded, strict=True):
        cut = {"truncation": "longest_first", "max_length": max_length, "return_token_type_ids": True}
        expected = tokenizer(first, second, **cut)
        assert example.sequences == ((expected["input_ids"], expected["token_type_ids"]),)


def test_a_batch_is_padded_to_its_longest_and_choices_are_rows(tmp_path: Path) -> None:
    tokenizer = load_tokenizer_folder(save_small_encoder(tmp_path / "model"))
    examples = ExampleEncoder(tokenizer, 32).encode(
        [Example("cat", ("the dog", "it"), 1), Example("the", ("yes", "no"), 0)]
    )
    batch = collate(examples, tokenizer.pad_token_id, torch.device("cpu"))
    firsts, seconds = ["cat", "cat", "the", "the"], ["the dog", "it", "yes", "no"]
    expected = tokenizer(firsts, seconds, padding=True, return_token_type_ids=True, return_tensors="pt")
    for name, values in batch.items():
        assert torch.equal(values, expected[name]), name


def test_an_epoch_holds_every_row_once_and_little_padding() -> None:
    lengths = torch.randint(5, 100, (1003,), generator=torch.Generator().manual_seed(1)).tolist()
    epochs = [list(training_batches(lengths, 8, torch.Generator().manual_seed(seed))) for seed in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert sorted(row for batch in epochs[0] for row in batch) == list(range(1003))
    assert sorted(map(len, epochs[0])) == [3] + [8] * 125
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in epochs[0])
    assert padded < 1.1 * sum(lengths)


def test_balanced_loss_weighs_classes_alike_and_regular_loss_rows() -> None:
    logits = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    classes = torch.tensor([0, 0, 0, 0, 2, 2, 3])  # class 1 does not occur
    nats = -logits.log_softmax(-1)[torch.arange(7), classes]
    by_class = torch.stack([nats[classes == c].mean() for c in (0, 2, 3)]).mean()
    torch.testing.assert_close(class_loss(logits, classes, balanced=True), by_class)
    torch.testing.assert_close(class_loss(logits, classes, balanced=False), nats.mean())
    even = torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(
        class_loss(logits[:4], even, balanced=True), class_loss(logits[:4], even, balanced=False)
    )


def test_metrics_of_constant_predictions_are_zero_and_of_right_ones_one() -> None:
    right, constant = np.array([0.0, 1.0, 1.0, 0.0]), np.ones(4)
    for metric in ("matthews", "pearson", "spearman"):
        assert compute_metric(metric, right, constant) == 0.0
        assert compute_metric(metric, right, right) == pytest.approx(1.0)
        assert compute_metric(metric, right[:1], right[:1]) == 0.0
    assert compute_metric("f1", right, constant) == pytest.approx(2 / 3)
    assert compute_metric("macro_f1", right, constant) == pytest.approx(1 / 3)
    assert compute_metric("accuracy", right, constant) == 0.5


def test_the_papers_settings_are_the_defaults() -> None:
    table_13 = paper_settings("glue/cola")
    assert (table_13.loss, table_13.learning_rate, table_13.weight_decay) == ("balanced", 1e-5, 0.0)
    assert (table_13.batch_size, table_13.epochs, table_13.warmup) == (32, 10, 0.1)
    table_11 = paper_settings("superglue/cb", "regular")
    assert (table_11.loss, table_11.learning_rate, table_11.weight_decay) == ("regular", 5e-6, 0.01)
    xnli = paper_settings("xnli/fr", epochs=3)
    assert (xnli.loss, xnli.learning_rate, xnli.batch_size, xnli.epochs) == ("regular", 2e-5, 128, 3)
    with pytest.raises(FieldError, match="`--batch-size` must be above 0, but is 0 instead"):
        paper_settings("glue/cola", batch_size=0)
