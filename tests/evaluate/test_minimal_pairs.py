"""BLiMP's accuracies are lm-eval's own on each paradigm, and their means and errors what a count by hand gives."""

from __future__ import annotations

from importlib.util import find_spec
from math import sqrt
from pathlib import Path

import pytest
import yaml
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from megahead.errors import DataError, FieldError
from megahead.evaluate.harness import evaluate_tasks
from megahead.evaluate.harness_tasks import accuracy_by, read_blimp, task_files, task_rows, write_tasks
from megahead.evaluate.results import Score
from megahead.hf.export import ensure_hf_folder
from megahead.hf.loading import load_causal, load_tokenizer_folder
from support.blimp import write_blimp
from support.small_checkpoint import save_small, save_tokenizer, small_config
from support.small_encoder import save_small_encoder
from support.stated import Stated


def test_every_paradigm_counts_the_same_and_a_tie_half(tmp_path: Path) -> None:
    pairs = [(f"good {k}", f"bad {k}") for k in range(8)]
    said = {f" {text}": -1.0 for pair in pairs for text in pair}
    said |= {" good 0": -0.5, " bad 1": -0.5, " bad 4": -2.0, " bad 5": -2.0}
    paradigms = {("one", "syntax"): pairs[:4], ("two", "syntax/semantics"): pairs[4:6]}
    paradigms[("three", "syntax_semantics")] = pairs[6:]
    rows = read_blimp(write_blimp(tmp_path / "blimp", paradigms), None)
    # one: 1, 0, 1/2, 1/2; two: 1, 1; three: 1/2, 1/2
    error = sqrt(0.5 / 3 / 4)  # of `one`; the others have no spread
    assert accuracy_by("field")(Stated(said), rows) == [
        Score("acc", pytest.approx(2 / 3), pytest.approx(error / 3)),
        Score("acc_syntax", pytest.approx(0.5), pytest.approx(error)),
        Score("acc_syntax_semantics", pytest.approx(0.75), pytest.approx(0)),
    ]
    by_paradigm = accuracy_by("UID")(Stated(said), rows)
    assert [(score.metric, score.value) for score in by_paradigm[1:]] == [
        ("acc_one", 0.5),
        ("acc_three", 0.5),
        ("acc_two", 1.0),
    ]
    assert accuracy_by("field")(Stated(said), rows[:1])[0] == Score("acc", 1.0, None)


def theirs(folder: Path, data: Path, name: str, made: Path, limit: int) -> float:
    """lm-eval's accuracy on the first pairs of a paradigm, by the definition it ships."""
    shipped = Path(str(find_spec("lm_eval").origin)).parent / "tasks/blimp" / f"{name}.yaml"  # type: ignore[union-attr]
    kwargs = {"data_files": {"train": str(data / f"{name}.jsonl")}, "cache_dir": str(made / "cache")}
    content = {"include": str(shipped), "task": name, "dataset_path": "json", "dataset_name": None}
    made.mkdir()
    (made / f"{name}.yaml").write_text(yaml.safe_dump({**content, "dataset_kwargs": kwargs}))
    manager = TaskManager(include_path=str(made), include_defaults=False)
    lm = HFLM(pretrained=load_causal(folder), tokenizer=load_tokenizer_folder(folder), batch_size=4, device="cpu")
    found = simple_evaluate(lm, tasks=list(manager.load([name])["tasks"].values()), task_manager=manager, limit=limit)
    return float(found["results"][name]["acc,none"])


def test_lm_eval_finds_the_same(shared_data: Path, tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    folder, limit = ensure_hf_folder(tmp_path / "run"), 20
    (task,) = evaluate_tasks(folder, task_files(["blimp_paradigms"], shared_data), limit=limit)
    assert (task.samples, len(task.scores)) == (34 * limit, 1 + 34)
    found = {score.metric: score.value for score in task.scores}
    for name in ("adjunct_island", "anaphor_number_agreement"):
        assert found[f"acc_{name}"] == theirs(folder, shared_data / "eval/blimp", name, tmp_path / name, limit)


def test_real_files_hold_a_thousand_pairs_of_each_paradigm(shared_data: Path) -> None:
    rows = task_rows("blimp", task_files(["blimp"], shared_data)["blimp"])
    fields = [row["field"] for row in rows]
    counts = {"morphology": 9000, "semantics": 4000, "syntax": 13000, "syntax_semantics": 8000}
    assert {field: fields.count(field) for field in set(fields)} == counts


def test_encoders_are_scored_on_pairs_and_refused_elsewhere(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    folder = save_small_encoder(tmp_path / "model")
    BertForMaskedLM(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    same = ("the cat sat", "The cat sat")  # one text to an uncased tokenizer
    write_blimp(tmp_path / "data/eval/blimp", {("one", "syntax"): [same] * 2})
    (task,) = evaluate_tasks(folder, task_files(["blimp"], tmp_path / "data"))
    assert task.scores[0] == Score("acc", 0.5, 0.0)
    (tmp_path / "text.txt").write_text("the cat sat")
    with pytest.raises(FieldError, match=r"must name tasks of blimp, .* for an encoder, but is bits_per"):
        next(evaluate_tasks(folder, task_files(["bits_per_byte"], text=tmp_path / "text.txt")))


def test_what_is_no_blimp_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must hold eval/blimp for task blimp"):
        task_files(["blimp"], tmp_path)
    folder = write_blimp(tmp_path / "eval/blimp", {})
    with pytest.raises(DataError, match=r"must hold BLiMP's \.jsonl files"):
        task_files(["blimp"], tmp_path)
    (folder / "one.jsonl").write_text('{"sentence_good": "a"}\n')
    with pytest.raises(DataError, match="with a `sentence_bad`, but line 1 is not"):
        task_files(["blimp"], tmp_path)


def test_only_lm_evals_tasks_are_written_for_it(tmp_path: Path) -> None:
    write_blimp(tmp_path / "eval/blimp", {("one", "syntax"): [("a", "b")]})
    (tmp_path / "cloze.jsonl").write_text('{"text": "a b"}\n')
    files = task_files(["blimp", "cloze"], tmp_path, tmp_path / "cloze.jsonl")
    assert [file.name for file in write_tasks(files, tmp_path / "made").iterdir()] == ["cloze.yaml"]
