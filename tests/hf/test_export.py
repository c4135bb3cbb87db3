"""What an exported folder holds, which heads a checkpoint can have, and that nothing wrong is ever left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPTNeoXConfig

import megahead
from megahead.data.tokenizer import load_tokenizer
from megahead.data.writer import IndexedDatasetWriter
from megahead.errors import CheckpointError, DataError, UserError
from megahead.hf import heads as export_heads
from megahead.hf import settings as export_settings
from megahead.hf.export import ensure_hf_folder, export
from megahead.hf.loading import load_causal
from megahead.hf.settings import ExportOrigin, read_origin
from support.small_checkpoint import save_small, save_tokenizer, small_config

VANILLA = {"name": "vanilla"}
TIED = {"name": "vanilla", "tied": True}


def test_the_folder_is_complete_and_says_what_it_is(tmp_path: Path) -> None:
    step = save_small(tmp_path / "run", small_config(model={"vocab_size": 300}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    report = export(step, tmp_path / "out", "pmi")
    folder = report.folder
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 0, 1)
    assert config["megahead"]["head"] == "pmi"
    parity = json.loads((folder / "parity.json").read_text())
    assert parity["largest_error"]["float32"] == report.parity.largest_error["float32"] < 1e-4
    card = (folder / "README.md").read_text()
    assert "log q" in card
    assert "384 tokens" in card
    assert "2309.08351" in card
    assert "| Data | nowhere |" in card
    assert "| Held-out text | not evaluated |" in card
    assert read_origin(folder) == ExportOrigin("small", 384)


def test_the_card_tells_data_and_the_last_evaluation_before_the_checkpoint(tmp_path: Path) -> None:
    mixed = {"vanilla_weight": 0.3, "tied": True}
    blend = [{"prefix": "texts/wiki", "weight": 0.75}, {"prefix": "texts/novels", "weight": 0.25}]
    save_small(tmp_path / "run", small_config(data={"train": blend}, objective=mixed), step=3)
    records = [
        {
            "step": step,
            "validation": {"perplexity": 10.0 * step, "accuracy": 0.25, "bits_per_byte": bits, "head": "pmi"},
        }
        for step, bits in ((1, None), (2, 1.5), (4, None))
    ]
    lines = [json.dumps(record) + "\n" for record in [*records, {"step": 3, "loss": 1.0}]]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines) + '{"step": 3, "valid')
    card = (export(tmp_path / "run", tmp_path / "out", "tied").folder / "README.md").read_text()
    assert "| Objective | contrastive weight tying (headless), 0.3 vanilla softmax, temperature 1 |" in card
    assert "| Data | wiki (weight 0.75); novels (weight 0.25) |" in card
    assert "| Held-out text | perplexity 20, 1.5 bits a byte, accuracy 25.0% (pmi head, step 2) |" in card
    assert f"| Exported by | megahead {megahead.__version__}" in card


def test_what_was_set_aside_is_exported_by_its_name_and_tells_its_own_evaluation(tmp_path: Path) -> None:
    """The run went back to step 1 since, and was evaluated again at other weights."""
    folder = save_small(tmp_path / "run", small_config(), step=3, validation={"step": 2, "loss": 2.5})
    folder = folder.rename(folder.with_name("abandoned-step-00000003"))
    records = [
        {"step": step, "validation": {"loss": loss, "perplexity": 10 * loss, "accuracy": 0.25, "head": "pmi"}}
        for step, loss in ((2, 2.5), (2, 7.0), (3, 6.0))
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    card = (export(folder, tmp_path / "out", "tied").folder / "README.md").read_text()
    assert "| Held-out text | perplexity 25, accuracy 25.0% (pmi head, step 2) |" in card


def test_tokenizer_files_give_the_ids_we_trained_on(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    folder = export(tmp_path / "run", tmp_path / "out", "tied").folder
    text = "the cat  saw\n\tÜnïcode <|endoftext|>the mat ."
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(text)["input_ids"] == load_tokenizer(tmp_path / "run" / "tokenizer.json").encode_batch([text])[0]
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (0, 1, len(load_vocabulary(folder)))


def load_vocabulary(folder: Path) -> set[str]:
    content = json.loads((folder / "tokenizer.json").read_text())
    return set(content["model"]["vocab"]) | {token["content"] for token in content["added_tokens"]}


def test_an_end_token_that_the_tokenizer_lacks_is_reported(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 900}, data={"end_token": 899}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    with pytest.raises(DataError, match=r"data\.end_token \(899\)"):
        export(tmp_path / "run", tmp_path / "out", "tied")
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_a_larger_model_is_reported(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 61}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    with pytest.raises(DataError, match=r"at most 61 ids \(model\.vocab_size\)"):
        export(tmp_path / "run", tmp_path / "out", "tied")


def test_padding_rows_are_dropped_or_kept_without_ever_winning(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config())
    trimmed = export(tmp_path / "run", tmp_path / "trimmed", "pmi").folder
    kept = export(tmp_path / "run", tmp_path / "kept", "pmi", keep_padding=True).folder
    ids = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        short, full = load_causal(trimmed)(ids).logits, load_causal(kept)(ids).logits
    assert short.shape[-1] == 61
    assert full.shape[-1] == 64
    torch.testing.assert_close(full.log_softmax(-1)[..., :61], short.log_softmax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("objective", "head"), [({}, "tied"), ({}, "pmi"), (VANILLA, "trained")])
def test_padding_rows_that_would_be_probable_are_refused(tmp_path, monkeypatch, objective, head) -> None:
    save_small(tmp_path / "run", small_config(objective=objective))
    monkeypatch.setattr(export_heads, "PADDING_BIAS", -2.0)
    with pytest.raises(CheckpointError, match="padding rows must take at most 1e-06 of the exported probability, but"):
        export(tmp_path / "run", tmp_path / "out", head, keep_padding=True)
    assert export(tmp_path / "run", tmp_path / "out", head).parity.padding == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kept_padding_rows_are_silent_in_any_dtype(tmp_path: Path, dtype: str) -> None:
    save_small(tmp_path / "run", small_config(objective=TIED, model={"vocab_multiple": 256}))
    report = export(tmp_path / "run", tmp_path / "out", "trained", dtype=dtype, keep_padding=True)
    assert report.parity.padding == 0
    assert "never probable" in (report.folder / "README.md").read_text()
    assert GPTNeoXConfig.from_pretrained(report.folder).tie_word_embeddings is False


@pytest.mark.parametrize(
    ("objective", "head", "stored"),
    [({}, "tied", False), ({"temperature": 0.5}, "tied", True), (TIED, "trained", False), (VANILLA, "trained", True)],
)
def test_a_head_equal_to_the_embedding_is_not_stored_twice(tmp_path, objective, head, stored) -> None:
    save_small(tmp_path / "run", small_config(objective=objective))
    folder = export(tmp_path / "run", tmp_path / "out", head).folder
    assert ("embed_out.weight" in load_file(folder / "model.safetensors")) is stored
    assert GPTNeoXConfig.from_pretrained(folder).tie_word_embeddings is not stored


@pytest.mark.parametrize(("objective", "head"), [({}, "trained"), (VANILLA, "tied"), (VANILLA, "pmi"), (TIED, "pmi")])
def test_a_head_the_run_cannot_have_is_refused(tmp_path, objective, head) -> None:
    save_small(tmp_path / "run", small_config(objective=objective))
    with pytest.raises(UserError, match=r"`--head \w+` needs .*, but .*; use"):
        export(tmp_path / "run", tmp_path / "out", head)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("head", ["tied", "pmi", "none"])
def test_an_export_that_differs_from_its_source_fails_and_leaves_nothing(tmp_path, monkeypatch, head) -> None:
    save_small(tmp_path / "run", small_config())
    write = export_settings.write_json
    wrong = {"config.json": {"use_parallel_residual": False}}
    monkeypatch.setattr(export_settings, "write_json", lambda path, c: write(path, c | wrong.get(path.name, {})))
    with pytest.raises(CheckpointError, match="must be within"):
        export(tmp_path / "run", tmp_path / "out", head)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_weights_that_are_not_numbers_never_pass(tmp_path: Path) -> None:
    config = small_config(model={"norm_eps": 1e-5})
    save_small(tmp_path / "run", config, scale=1e30)
    with pytest.raises(CheckpointError, match="must be within"):
        export(tmp_path / "run", tmp_path / "out", "tied")


def test_real_text_is_compared_too_where_it_is_at_hand(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=61) as writer:
        writer.add_document(torch.arange(100) % 61)
    save_small(tmp_path / "run", small_config(data={"train": str(tmp_path / "text")}))
    save_small(tmp_path / "elsewhere", small_config())
    with_text = export(tmp_path / "run", tmp_path / "a", "pmi").parity
    without = export(tmp_path / "elsewhere", tmp_path / "b", "pmi").parity
    with IndexedDatasetWriter(tmp_path / "text", vocab_size=100) as writer:
        writer.add_document(torch.arange(100))
    with_another_text = export(tmp_path / "run", tmp_path / "c", "pmi").parity
    assert [parity.tokens for parity in (with_text, without, with_another_text)] == [4 * 32, 2 * 32, 3 * 32]


def test_a_run_resolves_to_its_export_which_is_kept_until_the_checkpoint_changes(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config())
    first = ensure_hf_folder(tmp_path / "run")
    assert first == tmp_path / "run" / "exports" / "step-00000003-pmi"
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert ensure_hf_folder(tmp_path / "run") == ensure_hf_folder(first) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    save_small(tmp_path / "run", small_config(), seed=1)
    assert ensure_hf_folder(tmp_path / "run") == first
    assert (first / "model.safetensors").stat().st_mtime_ns != made


def test_an_export_of_an_earlier_version_is_made_again(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config())
    parity = ensure_hf_folder(tmp_path / "run") / "parity.json"
    earlier = {name: value for name, value in json.loads(parity.read_text()).items() if name != "version"}
    parity.write_text(json.dumps(earlier))
    ensure_hf_folder(tmp_path / "run")
    assert json.loads(parity.read_text()).items() > earlier.items()


def test_an_export_without_a_tokenizer_is_made_again_once_the_run_has_one(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300}))
    assert not (ensure_hf_folder(tmp_path / "run") / "tokenizer.json").exists()
    save_tokenizer(tmp_path / "run/tokenizer.json")
    assert (ensure_hf_folder(tmp_path / "run") / "tokenizer.json").is_file()


def test_a_checkpoint_taken_out_of_its_run_is_exported_within_itself(tmp_path: Path) -> None:
    taken = save_small(tmp_path / "run", small_config()).rename(tmp_path / "step-00000003")
    assert ensure_hf_folder(taken) == taken / "exports/step-00000003-pmi"


def test_a_folder_of_nothing_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a run or a checkpoint, but is none"):
        ensure_hf_folder(tmp_path)


def test_a_backbone_never_loads_as_a_language_model_with_a_random_head(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config())
    folder = export(tmp_path / "run", tmp_path / "out", "none").folder
    with pytest.raises(CheckpointError, match="missing keys"):
        load_causal(folder)


def test_an_export_in_shards_speaks_as_the_one_in_a_single_file(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(objective=VANILLA))
    whole = export(tmp_path / "run", tmp_path / "whole", "trained").folder
    shards = export(tmp_path / "run", tmp_path / "shards", "trained", shard_bytes=40_000).folder
    assert len(list(shards.glob("model-*-of-*.safetensors"))) > 2
    assert not (shards / "model.safetensors").exists()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(load_causal(whole)(ids).logits, load_causal(shards)(ids).logits)


def test_generation_settings_are_those_transformers_uses(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config())
    model = load_causal(export(tmp_path / "run", tmp_path / "out", "pmi").folder)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (0, 0)
