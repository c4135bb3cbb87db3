"""What lies beside the weights of an export: tokenizer files and the model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers

from megahead.convert.heads import Head
from megahead.convert.provenance import code_version, dataset_names, held_out
from megahead.convert.source import TrainedModel
from megahead.convert.verify import Parity
from megahead.errors import DataError

PADDING_TOKEN = "<|padding|>"

_HEADS = {
    "none": "none: the backbone alone, outputs are hidden states",
    "tied": "`E h`, the input embedding itself",
    "pmi": "`E h + log q`, training-free: q is the distribution of the training targets (of all candidates, where the "
    "objective has others), folded into the output matrix and the final norm's bias",
    "trained": "the matrix that was trained",
}


def write_tokenizer(source: Path, folder: Path, *, vocab_size: int, end_token: int, max_length: int) -> dict[str, int]:
    """Copies `source` and adds the settings that transformers (4 and 5) reads; returns the ids that generation needs.

    Special tokens are the tokenizer's own, none is added: the end token, and `<|padding|>` where it has one.
    Raises DataError for a tokenizer that cannot be this model's.
    """
    vocabulary = tokenizers.Tokenizer.from_file(str(source))
    ids = max(vocabulary.get_vocab(with_added_tokens=True).values()) + 1
    if ids > vocab_size:
        raise DataError(f"`{source}` must have at most {vocab_size} ids (model.vocab_size), but has {ids} instead.")
    end = vocabulary.id_to_token(end_token)
    if end is None:
        raise DataError(f"`{source}` must have a token with the id of data.end_token ({end_token}), but has none.")
    padding_id = vocabulary.token_to_id(PADDING_TOKEN)
    padding = end if padding_id is None else PADDING_TOKEN
    special = {"bos_token": end, "eos_token": end, "unk_token": end, "pad_token": padding}
    settings = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    shutil.copyfile(source, folder / "tokenizer.json")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return {"pad_token_id": end_token if padding_id is None else padding_id}


def model_card(model: TrainedModel, head: Head, dtype: str, parity: Parity) -> str:
    """README.md of an export."""
    config, objective = model.config, model.config.objective
    tokens = model.checkpoint.state.get("tokens")
    learned = "contrastive weight tying (headless)" if objective.name == "headless" else "vanilla softmax"
    errors = ", ".join(f"{error:.1e} in {kind}" for kind, error in parity.largest_error.items())
    loader = "AutoModel" if head.matrix is None else "AutoModelForCausalLM"
    facts = {
        "Objective": f"{learned}, temperature {model.temperature():g}",
        "Shape": f"{config.model.num_layers} layers, width {config.model.hidden_size}, {config.model.num_heads} heads",
        "Trained for": f"{model.checkpoint.step:,} steps" + (f", {tokens:,} tokens" if tokens is not None else ""),
        "Data": dataset_names(config.data),
        "Held-out text": held_out(model) or "not evaluated",
        "Head": _HEADS[head.name],
        "Stored as": dtype,
        "Largest error": f"{errors}, of {parity.compared} up to {parity.largest_output:.1f}, against the checkpoint",
        "Exported by": code_version(),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return _CARD.format(name=config.name, table=table, loader=loader)


_CARD = """---
library_name: transformers
tags: [headless, contrastive-weight-tying]
---
# {name}

A GPT-NeoX model, pretrained and exported with megahead.

| | |
|---|---|
{table}

```python
from transformers import AutoTokenizer, {loader}

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = {loader}.from_pretrained("PATH")
```

The method: N. Godey, E. de la Clergerie, B. Sagot, *Headless Language Models: Learning without Predicting with
Contrastive Weight Tying*, ICLR 2024, arXiv 2309.08351.
"""
