"""Bits per byte are lm-eval's, with an error of their own."""

from __future__ import annotations

import json
from math import log, sqrt
from pathlib import Path
from statistics import stdev

import pytest
import yaml
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from megahead.errors import DataError, FieldError
from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.harness_tasks import bits_per_byte, task_files
from megahead.hf.export import ensure_hf_folder
from megahead.hf.loading import load_causal, load_tokenizer_folder
from support.small_checkpoint import save_small, save_tokenizer, small_config
from support.stated import Stated

TEXTS = ["the cat sat on the mat " * 12, "où est le chat ?", "the dog saw the cat"]


@pytest.mark.long
def test_lm_eval_finds_the_same(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300, "max_positions": 32}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    folder, text = ensure_hf_folder(tmp_path / "run"), tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    content = {
        "task": "bits",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(text)}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "made").mkdir()
    (tmp_path / "made/bits.yaml").write_text(yaml.safe_dump(content))
    manager = TaskManager(include_path=str(tmp_path / "made"), include_defaults=False)
    lm = HFLM(pretrained=load_causal(folder), tokenizer=load_tokenizer_folder(folder), batch_size=2, device="cpu")
    tasks = list(manager.load(["bits"])["tasks"].values())
    for limit in (None, 2):
        (task,) = evaluate_tasks(folder, task_files(["bits_per_byte"], text=text), limit=limit)
        theirs = simple_evaluate(lm, tasks=tasks, task_manager=manager, limit=limit)["results"]["bits"]
        assert task.samples == (limit or len(TEXTS))
        assert task.scores[0].value == pytest.approx(theirs["bits_per_byte,none"], rel=1e-5)


def test_the_error_over_documents_of_one_size_is_that_of_their_mean() -> None:
    nats = {"aaaa": -4.0, "bbbb": -7.0, "cccc": -5.0}
    bits = [-value / log(2) / 4 for value in nats.values()]
    (score,) = bits_per_byte(Stated(nats), list(nats))
    assert score.value == pytest.approx(sum(bits) / 3)
    assert score.stderr == pytest.approx(stdev(bits) / sqrt(3))
    assert bits_per_byte(Stated(nats), ["aaaa"])[0].stderr is None


def test_bits_of_all_documents_are_divided_by_their_bytes_in_utf_8() -> None:
    """As lm-eval does, to which the long test compares it."""
    nats = {"où": -4.0, "a": -1.0, "déjà vu": -9.0}  # of 3, 1 and 9 bytes
    assert bits_per_byte(Stated(nats), list(nats))[0].value == pytest.approx(14 / log(2) / 13)


def test_a_text_that_is_missing_or_unreadable_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="`--text` must name the file of task bits_per_byte"):
        task_files(["bits_per_byte"], tmp_path)
    (tmp_path / "text.jsonl").write_text("the cat\n")
    with pytest.raises(DataError, match=r"text\.jsonl:1` must be one JSON object"):
        task_files(["bits_per_byte"], text=tmp_path / "text.jsonl")
