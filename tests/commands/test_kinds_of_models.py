"""Commands for one kind of model refuse the other kind before they export its run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megahead.__main__ import main
from support.small_checkpoint import save_small, save_tokenizer, small_config

ENCODER = "must hold an encoder, whose .CLS. reads the whole text"
MASKING = {"mask_token": 4, "cls_token": 2, "sep_token": 3}


@pytest.mark.parametrize(
    ("family", "command", "sentence"),
    [
        ("gpt_neox", "embed --input text.txt --output v.npy --pooling mean", ENCODER),
        ("gpt_neox", "pseudo-perplexity --input text.txt", ENCODER),
        ("gpt_neox", "finetune --task retrieval/pairs.jsonl", ENCODER),
        ("gpt_neox", "generate --prompt cat --passes 2", "`--passes` must be left out for a decoder"),
        ("gpt_neox", "eval-harness --tasks retrieval --articles pairs.jsonl", "piqa, openbookqa, .* for a decoder"),
        ("bert", "convert items --output vectors --items items.json", "must hold a decoder, which predicts what comes"),
        ("bert", "eval-harness --tasks bits_per_byte --text text.txt", "must name tasks of blimp, .* for an encoder"),
    ],
)
def test_a_model_of_the_other_kind_is_refused_before_it_is_exported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    family: str,
    command: str,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat\n")
    Path("items.json").write_text('[{"id":0,"key":null,"count":0},{"id":1,"key":"a","count":1}]')
    pairs = (f'{{"query": "cat {k}", "positive": "the cat {k}"}}\n' for k in range(20))
    Path("pairs.jsonl").write_text("".join(pairs))
    masking = {"masking": MASKING} if family == "bert" else {}
    save_small(Path("run"), small_config(model={"vocab_size": 300, "family": family}, **masking))
    save_tokenizer(Path("run/tokenizer.json"))
    monkeypatch.setattr(sys, "argv", ["megahead", *command.split(), "--model", "run"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert re.search(sentence, capsys.readouterr().err)
    assert not Path("run/exports").exists()
