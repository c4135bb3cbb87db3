"""What else a user can do wrong, and the sentence each mistake prints, word for word; F stands for the test's folder."""

# ruff: noqa: E501 - a sentence stands on one line, as it is printed

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megahead.checkpoints.reading import open_checkpoint
from megahead.config.loading import load_config
from megahead.config.objective import resolve_candidate_group_samples
from megahead.config.plan import deepspeed_config
from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import preprocess
from megahead.data.tokenizer import load_tokenizer
from megahead.data.writer import IndexedDatasetWriter
from megahead.distributed.group import Group
from megahead.distributed.launch import choose_device, read_launch
from megahead.errors import UserError
from megahead.evaluate.harness_tasks import task_files
from megahead.hf.export import ensure_hf_folder, export
from megahead.hf.importing import from_hf
from megahead.hf.loading import load_causal
from megahead.report.read import read_metrics
from megahead.run_folder import RunFolder
from megahead.train.datasets import open_datasets, require_same_run
from megahead.train.start import find_resume_point, starting_weights
from support import small_checkpoint
from support.commands import ROOT
from support.named import without_digits
from support.small_checkpoint import save_small, save_tokenizer
from support.small_run import small_config, write_text

CONFIG = (("a: [1", [], "`F/run.yaml` must be YAML, but is not in line 1: expected ',' or ']', but got '<stream end>'."),
          ("- 1", [], "`F/run.yaml` must hold settings as `key: value`, but holds list instead."),
          ("name: a\nname: b", [], "`F/run.yaml` must be YAML, but is not in line 2: key 'name' is given twice."),
          ("engine: {deepspeed: zero1.json}", ["engine.deepspeed.zero_optimization.stage=2"], "`--set` must name a field of a section, but is 'engine.deepspeed.zero_optimization.stage=2' instead; engine.deepspeed is 'zero1.json': set it as a whole."),
          ("name: a", ["training.steps"], "`--set` must look like section.field=value, but is 'training.steps' instead; try --set training.steps=100."),
          (None, [], "`--config` must name a readable YAML file, but is F/run.yaml instead (No such file or directory)."))  # fmt: skip

ENGINE: tuple[tuple[dict[str, Any], int, str], ...] = (
    ({"engine.deepspeed": "no.json"}, 1, "`engine.deepspeed` must name a DeepSpeed JSON file, but is no.json instead (No such file or directory)."),
    ({"engine.deepspeed": {"zero_optimisation": {"stage": 2}}}, 1, "`engine.deepspeed.zero_optimisation` is not a setting; did you mean `engine.deepspeed.zero_optimization`?"),
    ({"engine.deepspeed": {"offload_optimizer": {"device": "cpu"}}}, 1, "`engine.deepspeed.offload_optimizer` is not a setting; did you mean `engine.deepspeed.zero_optimization.offload_optimizer`?"),
    ({"engine.deepspeed": {"gradient_acumulation_steps": 2}}, 1, "`engine.deepspeed.gradient_acumulation_steps` is not a setting; did you mean `engine.deepspeed.gradient_accumulation_steps`?"),
    ({"engine.deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"devise": "cpu"}}}}, 1, "`engine.deepspeed.zero_optimization.offload_optimizer.devise` is not a setting; did you mean `engine.deepspeed.zero_optimization.offload_optimizer.device`?"),
    ({"engine.deepspeed": {"zero_optimization": {"offload_optimizer": "cpu"}}}, 1, "`engine.deepspeed['zero_optimization']['offload_optimizer']` must be a section of settings, but is 'cpu' instead."),
    ({"engine.deepspeed": {"zero_optimization": {"cpu_offload": True}}}, 1, "`engine.deepspeed['zero_optimization']['cpu_offload']` must be left out (it is called \"offload_optimizer\": {\"device\": \"cpu\"} now), but is True instead."),
    ({"engine.deepspeed": {"checkpoint": {"load_universal": True}}}, 1, "`engine.deepspeed['checkpoint']` must be left out (runs save and resume checkpoints of their own, `training.checkpoint_every`), but is {'load_universal': True} instead."),
    ({"engine.deepspeed": {"pipeline": {"stages": 2}}}, 1, "`engine.deepspeed['pipeline']` must be left out (`parallel` splits the model, and no model here has experts or stages of a pipeline), but is {'stages': 2} instead."),
    ({"engine.deepspeed": {"gradient_allreduce_op": "sum"}}, 1, "`engine.deepspeed['gradient_allreduce_op']` must be left out or agree with the run (mean), but is sum instead; remove it there."),
    ({"engine.deepspeed": {"zero_optimization": {"stage": 3, "reduce_scatter": False}, "gradient_predivide_factor": 2.0}}, 1, "`engine.deepspeed['gradient_predivide_factor']` must be left out or agree with ZeRO stage 3 (1.0), but is 2.0 instead; remove it there."),
    ({"engine.deepspeed": {"zero_optimization": {"stage": 4}}}, 1, "`engine.deepspeed.zero_optimization.stage` must be 0, 1, 2 or 3, but is 4 instead."),
    ({"engine.deepspeed": {"gradient_clipping": 0.5}}, 1, "`engine.deepspeed['gradient_clipping']` must be left out or agree with the run (1.0), but is 0.5 instead; remove it there."),
    ({"engine.deepspeed": {"wandb": {}}}, 1, "`engine.deepspeed['wandb']` must be left out (runs log into their own folder), but is {} instead."),
    ({"engine.deepspeed": {"bf16": {"enabled": True}}}, 1, "`engine.deepspeed['bf16']['enabled']` must be left out or agree with engine.precision=fp32 (False), but is True instead; remove it there."),
    ({"engine.deepspeed": {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}}, 1, "`engine.deepspeed['fp16']['enabled']` must be left out or agree with engine.precision=fp32 (False), but is True instead; remove it there."),
    ({"engine.deepspeed": {"zero_optimization": {"stage": 1}, "fp16": {"enabled": False}}, "engine.precision": "fp16"}, 1, "`engine.deepspeed['fp16']['enabled']` must be left out or agree with engine.precision=fp16 (True), but is False instead; remove it there."),
    ({"engine.deepspeed": {"zero_optimization": {"stage": 1}, "bf16": {"check_grad_overflow": False}}, "engine.precision": "bf16"}, 1, "`engine.deepspeed['bf16']['check_grad_overflow']` must be left out or agree with engine.precision=bf16 (True), but is False instead; remove it there."),
    ({"engine.deepspeed": {"zero_optimization": {"stage": 1}, "bf16": {"bf16_master_weights_and_grads": True}}, "engine.precision": "bf16"}, 1, "`engine.deepspeed['bf16']['bf16_master_weights_and_grads']` must be left out or agree with engine.precision=bf16 (False), but is True instead; remove it there."),
    ({"engine.deepspeed": {"torch_autocast": {"enabled": True, "dtype": "float16"}}}, 1, "`engine.deepspeed['torch_autocast']['enabled']` must be left out or agree with engine.precision=fp32 (False), but is True instead; remove it there."),
    ({"engine.deepspeed": {"torch_autocast": {"enabled": True, "dtype": "float16"}}, "engine.precision": "bf16"}, 1, "`engine.deepspeed['torch_autocast']['dtype']` must be left out or agree with engine.precision=bf16 (bfloat16), but is float16 instead; remove it there."),
    ({"engine.deepspeed": {"data_types": {"grad_accum_dtype": "bf16"}}}, 1, "`engine.deepspeed['data_types']` must be left out or agree with the run ({'grad_accum_dtype': 'fp32'}), but is {'grad_accum_dtype': 'bf16'} instead; remove it there."),
    ({"engine.deepspeed": {"bf16": True}}, 1, "`engine.deepspeed['bf16']` must be a section of settings, but is True instead."),
    ({"engine.deepspeed": {"bfloat16": {"enabled": True}}}, 1, "`engine.deepspeed['bfloat16']` must be left out (engine.precision decides), but is {'enabled': True} instead."),
    ({"engine.deepspeed": {"scheduler": {"type": "WarmupLR"}}}, 1, "`engine.deepspeed['scheduler']` must be left out (the run's own `schedule` is used), but is {'type': 'WarmupLR'} instead."),
    ({"engine.deepspeed": {"managed_gradient_accumulation": False}}, 1, "`engine.deepspeed['managed_gradient_accumulation']` must be left out or agree with the run (True), but is False instead; remove it there."),
    ({"engine.deepspeed": {"zero_optimization": {"stage": 2, "compute_grad_norm": False}}}, 1, "`engine.deepspeed['zero_optimization']['compute_grad_norm']` must be left out or agree with the run (True), but is False instead; remove it there."),
    ({"engine.deepspeed": {}, "engine.precision": "fp16"}, 1, "`engine.precision` must be fp32 or bf16 at ZeRO stage 0, but is fp16 instead; or use stage 1."),
    ({"engine.deepspeed": {"zero_optimization": {"stage": 3}}, "engine.activation_checkpointing": "selective"}, 1, "`engine.activation_checkpointing` must be true or false at ZeRO stage 3, where DeepSpeed overwrites saved products, but is `selective` instead."),
    ({}, 3, "`batch.global_size` must be a multiple of micro_size x data ranks (2 x 3), but is 8 instead; try 2 data ranks, which keeps the recipe, or batch.global_size=6 or 12."),
    ({}, 8, "`batch.global_size` must be a multiple of micro_size x data ranks (2 x 8), but is 8 instead; try batch.micro_size=1 objective.group_samples=2, which keeps the recipe."),
)  # fmt: skip

LAUNCH = (
    ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}, "`MASTER_ADDR` must be set in the environment when WORLD_SIZE is 2, but is missing; start through deepspeed, torchrun or srun, or export it."),
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "`RANK` must be set in the environment when WORLD_SIZE is 2, but is missing; start through deepspeed, torchrun or srun, or export it."),
    ({"WORLD_SIZE": "2", "RANK": "one", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "`RANK` must be a whole number in the environment, but is 'one' instead."),
    ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "`RANK` must be below WORLD_SIZE (2), but is 2 instead."),
)  # fmt: skip


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def model(folder: Path, **sections: Any) -> Path:
    """A checkpoint of step 3; returns its one file of tensors."""
    (file,) = save_small(folder / "model", small_checkpoint.small_config(**sections)).glob("*.safetensors")
    return file


def shorten_and(file: str, action: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        shorten(folder / file)
        action(folder)

    return act


def flipped(folder: Path) -> None:
    file = model(folder)
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    open_checkpoint(folder / "model").verify()


def edited(folder: Path) -> None:
    file = model(folder).with_name("checkpoint.json")
    file.write_text(file.read_text().replace("384", "385"))
    open_checkpoint(folder / "model")


def shortened(folder: Path) -> None:
    shorten(model(folder))
    open_checkpoint(folder / "model")


def only_damaged(folder: Path) -> None:
    shorten(model(folder))
    find_resume_point("auto", RunFolder(folder / "model"), Group())


def only_set_aside(folder: Path) -> None:
    step = model(folder).parent
    step.rename(step.with_name(f"abandoned-{without_digits(step.name)}"))
    find_resume_point("auto", RunFolder(folder / "model"), Group())


def resumed_never(folder: Path) -> None:
    model(folder)
    find_resume_point("never", RunFolder(folder / "model"), Group())


def resumed_otherwise(folder: Path) -> None:
    model(folder)
    config = small_checkpoint.small_config(optimizer={"learning_rate": 2e-3})
    require_same_run(open_checkpoint(folder / "model"), config, {})


def started_from(checkpoint: str) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        model(folder)
        init = {"from_checkpoint": str(folder / checkpoint), "mode": "continue"}
        starting_weights(small_config(folder, {"init": init}), Group()).read("backbone.embedding.weight")

    return act


def wrong_tokenizer(folder: Path) -> None:
    save_tokenizer(folder / "t.json")
    model(folder, data={"tokenizer": str(folder / "t.json")})
    export(folder / "model", folder / "out", "pmi")


def wrong_head(folder: Path) -> None:
    model(folder)
    export(folder / "model", folder / "out", "trained")


def spoken_without_a_head(folder: Path) -> None:
    model(folder)
    load_causal(export(folder / "model", folder / "out", "none").folder)


def foreign_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "opt"}')
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    from_hf(folder, folder / "out")


def id_too_large(folder: Path) -> None:
    with IndexedDatasetWriter(folder / "x", vocab_size=5) as writer:
        writer.add_document([9])


def no_tokenizer(folder: Path) -> None:
    (folder / "t.json").write_text("{}")
    load_tokenizer(folder / "t.json")


def read_text(line: str, name: str = "a.jsonl") -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        save_tokenizer(folder / "t.json")
        (folder / name).write_text(line)
        preprocess([str(folder / name)], folder / "t.json", folder / "o")

    return act


def texts(**changes: Any) -> Callable[[Path], Any]:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda folder: open_datasets(small_config(folder, named))


def group_of_three(folder: Path) -> None:
    config = small_config(folder, {"objective.group_samples": 3})
    resolve_candidate_group_samples(config.objective, config.batch, 1)


STEP = "F/model/checkpoints/step-00000003"
TENSORS = f"{STEP}/tensors-00000-of-00001.safetensors"
FILES: tuple[tuple[Callable[[Path], Any], str], ...] = (
    (lambda folder: small_config(folder, {"parallel.tensor": 4}).parallel.data_ranks(6), "`parallel.tensor` must divide the number of ranks (6), but is 4 instead; try 4 ranks, or parallel.tensor=2."),
    (group_of_three, "`objective.group_samples` must divide batch.micro_size (2) or be a multiple, but is 3 instead."),
    (texts(data__tokenizer="no.json"), "`data.tokenizer` must name a readable file, but is no.json instead; or leave it out."),
    (texts(model__vocab_size=50), "`model.vocab_size` must be at least that of data.train (60), but is 50 instead."),
    (texts(data__end_token=1), "`data.end_token` must be the id that closes the documents of F/text, but is 1 (5 of 5 documents that were checked neither end nor begin with it) instead; set it to theirs (`megahead inspect-dataset` shows them), or leave documents unseparated (isolate_documents: false, boundary_targets: true)."),
    (texts(data__train="nowhere"), "`nowhere.idx` must exist, but does not; give the prefix of a `.bin` and `.idx` pair, without ending."),
    (texts(data__sequence_length=100_000, model__max_positions=100_000), "`F/text` must hold at least 200,000 tokens for rows of data.sequence_length, but holds 185 instead; add text or shorten data.sequence_length."),
    (shorten_and("text.idx", texts()), "`F/text.idx` must be 142 bytes long for 5 sequences and 6 document boundaries, but is 139 instead; it was cut short or is damaged."),
    (shorten_and("text.bin", lambda folder: IndexedDataset(folder / "text")), "`F/text.bin` must be 370 bytes long by its index, but is 367 instead; it was cut short or belongs to another index."),
    (flipped, f"`{TENSORS}` must match its checksum, but does not; it was damaged, use another checkpoint."),
    (shortened, f"`{TENSORS}` must have 242256 bytes, but has 242253 instead; use another checkpoint."),
    (edited, f"`{STEP}/checkpoint.json` must match its own checksum, but does not; it was damaged or edited, use another checkpoint."),
    (only_damaged, f"F/model must hold a valid checkpoint to continue from, but holds only damaged ones (1); remove them to start again: `{TENSORS}` must have 242256 bytes, but has 242253 instead; use another checkpoint."),
    (open_checkpoint, "`F` must be a checkpoint (a folder with checkpoint.json) or a folder that holds complete ones (step-*), but is neither."),
    (only_set_aside, "F/model must hold a checkpoint to resume, but holds only abandoned-step-00000003; name the one to continue from with --resume, or start again with --resume never."),
    (resumed_never, "`--resume never` needs an output folder without checkpoints, but F/model has step-00000003; choose another output_dir, or remove that checkpoint."),
    (resumed_otherwise, f"{STEP} must be of the same run to resume, but differs in optimizer.learning_rate (was 0.001, is 0.002); give a new run another `name` and `output_dir`, change these back, or name them in resume.allow."),
    (lambda folder: find_resume_point("nowhere", RunFolder(folder), Group()), "`--resume` must be auto, never or a checkpoint folder, but nowhere holds none."),
    (started_from("none"), "`init.from_checkpoint` must hold a checkpoint, but F/none holds none."),
    (started_from("model"), f"{STEP} must hold weight/backbone.embedding.weight of shape (64, 32), but has (64, 48) instead; give `model` the sizes of that run."),
    (wrong_tokenizer, "`F/t.json` must have at most 61 ids (model.vocab_size), but has 278 instead."),
    (wrong_head, "`--head trained` needs a run that trained a head, but this one was headless; use pmi, tied or none."),
    (spoken_without_a_head, "`F/out` must hold a head (missing keys: lm_head.weight), but is a backbone alone; export its checkpoint with --head pmi, or name the run itself."),
    (foreign_model, "`config.json: model_type` must be one of gpt_neox, llama, mistral, qwen2, qwen3, gpt2, gemma3_text, bert, distilbert, roberta, xlm-roberta, modernbert, modernbert-decoder, but is opt instead."),
    (ensure_hf_folder, "`F` must be a Hugging Face model folder, a run or a checkpoint, but is none."),
    (id_too_large, "token ids must lie below the vocabulary size 5, but one near document 0 is 9 instead; use the tokenizer the ids were made with."),
    (no_tokenizer, "`F/t.json` must be a tokenizer.json file, but cannot be read as one: Model missing. at line 1 column 2."),
    (lambda folder: load_tokenizer(folder / "t.json"), "`F/t.json` must be a tokenizer.json file or a .model, but there is none; check the path."),
    (read_text('{"text": 3}\n'), "`F/a.jsonl:1` must have a string in `text`, but has int instead."),
    (read_text("nope"), "`F/a.jsonl:1` must be one JSON object in UTF-8, but is not (invalid literal, expected 'null': line 1 column 1 (char 0))."),
    (read_text("", "a.doc"), "`F/a.doc` must end in one of .jsonl, .json, .txt, .md, .csv, .tsv, .dat (or these with .gz or .zst), .parquet, .arrow, .tar, .tar.gz, .tgz, .zip, but does not; convert or rename it."),
    (lambda folder: preprocess([f"{folder}/*.jsonl"], folder / "t.json", folder / "o"), "`F/*.jsonl` must match a file, but matches none; check the pattern."),
    (lambda folder: read_text('{"text": "a"}')(folder) or preprocess([str(folder / "a.jsonl")], folder / "t.json", folder / "t"), "`F/t.json` must not be named like the dataset's description, but `F/t` would write over it; give one of them another name."),
    (lambda folder: read_metrics(folder / "run"), "F/run/metrics.jsonl must be the metrics of a run, but cannot be read (No such file or directory); name a run folder such as runs/NAME."),
    (lambda folder: task_files(["sciq"], folder), "`F` must hold eval/sciq/validation.jsonl for task sciq, but lacks it; get it or leave the task out."),
)  # fmt: skip


def sentence_of(folder: Path, action: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        action()
    return without_digits(str(caught.value).replace(str(folder), "F"))


@pytest.mark.parametrize(("text", "overrides", "sentence"), CONFIG)
def test_a_config_that_cannot_be_read(tmp_path: Path, text: str | None, overrides: list[str], sentence: str) -> None:
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    assert sentence_of(tmp_path, lambda: load_config(tmp_path / "run.yaml", overrides)) == sentence


@pytest.mark.parametrize(("changes", "ranks", "sentence"), ENGINE)
def test_an_engine_or_batch_that_cannot_run(tmp_path: Path, changes: dict[str, Any], ranks: int, sentence: str) -> None:
    assert sentence_of(tmp_path, lambda: deepspeed_config(small_config(tmp_path, changes), ranks)) == sentence


@pytest.mark.parametrize(("environment", "sentence"), LAUNCH)
def test_a_launcher_that_says_too_little(tmp_path: Path, environment: dict[str, str], sentence: str) -> None:
    assert sentence_of(tmp_path, lambda: read_launch(environment)) == sentence


def test_cuda_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    expected = "`engine.device` must be cpu or auto on this machine, but is cuda instead; torch sees no CUDA device."
    assert sentence_of(tmp_path, lambda: choose_device("cuda", 0)) == expected


@pytest.mark.parametrize(("action", "sentence"), FILES)
def test_files_that_are_missing_damaged_or_of_another_kind(
    tmp_path: Path, action: Callable[[Path], Any], sentence: str
) -> None:
    write_text(tmp_path, documents=5)
    assert sentence_of(tmp_path, lambda: action(tmp_path)) == sentence


RAISED = {"UserError", "DataError", "CheckpointError", "RemoteError", "DamagedError", "LeaseLostError", "InUseError"}
FORMS = re.compile(r" must .*, but | needs .*, but | cannot .*: | has no valid ")


def test_every_error_that_is_raised_says_what_must_be_and_what_is() -> None:
    """Over the whole source: also the sentences that are not listed above."""
    sentences = list(raised_sentences())
    assert len(sentences) > 100
    wrong = [f"{place}: {text}" for place, text in sentences if not FORMS.search(text)]
    assert not wrong, "\n".join(wrong)


def raised_sentences() -> Iterator[tuple[str, str]]:
    """(place, literal parts) of each error built from a text; those that pass on another's sentence have none."""
    for path in sorted(path for part in ("megahead", "tools", "launch") for path in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                text = literal(node.args[0])
                if node.func.id in RAISED and re.search("[a-z]{2}", text):  # else it passes on another's
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return literal(node.left) + literal(node.right) if isinstance(node, ast.BinOp) else ""
