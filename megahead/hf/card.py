"""The model card of an export, README.md: what the model is, how it was trained, how it is loaded and served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from megahead.config.objective import ObjectiveConfig
from megahead.hf.heads import ExportTarget, Head
from megahead.hf.trained import (
    BACKBONE,
    EMBEDDING,
    HEAD,
    MASK_HEAD,
    TrainedModel,
    code_version,
    dataset_names,
    last_evaluation,
)
from megahead.hf.verify import Parity
from megahead.wording import format_duration, pluralize


@dataclass(frozen=True)
class CardFacts:
    """What a card cannot know by itself."""

    path: str
    """By which the model is loaded: a repository of the Hub, or a folder."""

    license: str | None = None
    """Of the weights, as the Hub names it: apache-2.0."""

    languages: tuple[str, ...] = ()
    """Of the text, as ISO 639 codes."""


class Served(NamedTuple):
    """The heads that other programs serve of a class, by the lists of vLLM 0.33 and gguf 0.19."""

    vllm: tuple[str, ...] = ()
    llama_cpp: tuple[str, ...] = ()


_DECODER = Served(("tied", "trained"), ("tied", "trained"))
_SERVED = {
    "GPTNeoX": Served(("tied", "pmi", "trained"), ("pmi", "trained")),
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Ernie4_5_Moe"), _DECODER),
    "Bert": Served(("none",), ("none",)),
    "ModernBert": Served(("none",), ("none",)),
}


def served_by(target: ExportTarget) -> str:
    """Which heads of such a model vLLM and llama.cpp serve, and whether this export is among them."""
    found = _SERVED.get(target.family.classes, Served())
    programs = {"vLLM": found.vllm, "llama.cpp": found.llama_cpp}
    able = [name for name, heads in programs.items() if target.head.name in heads]
    listed = "; ".join(f"{name} serves {_heads(heads)}" for name, heads in programs.items())
    return f"{listed}; this export: {' and '.join(able) or 'neither'}"


def _heads(heads: tuple[str, ...]) -> str:
    return f"--head {', '.join(heads)}" if heads else "none of its heads"


def model_card(target: ExportTarget, parity: Parity, facts: CardFacts) -> str:
    """The card, without a sample and curves, which `megahead convert` adds."""
    decodes, predicts = target.family.predicts == "CausalLM", target.has_head()
    tag = ("text-generation" if decodes else "fill-mask") if predicts else "feature-extraction"
    loader = f"AutoModelFor{target.family.predicts}" if predicts else "AutoModel"
    use = (_GENERATE if decodes else _FILL) if predicts else _EMBED
    program = _CALL if target.model.tokenizer() is None else f"{_TOKENIZE}\n{use}"
    given = [f"license: {json.dumps(facts.license)}"] if facts.license else []  # quoted: Norwegian's `no` is no boolean
    given += [f"language: {json.dumps(facts.languages)}"] if facts.languages else []
    does = (
        ("predicts the next token" if decodes else "fills in masked tokens") if predicts else "turns tokens to vectors"
    )
    trained, exported = _trained(target.model), _exported(target, parity)
    return _CARD.format(
        name=target.model.config.name,
        given="".join(f"{line}\n" for line in given),
        tag=tag,
        family=target.family.title,
        parameters=f"{_parameters(target):,}",
        does=does,
        trained=_table(trained),
        exported=_table(exported),
        program=program.format(loader=loader, path=json.dumps(facts.path, ensure_ascii=False)),
    )


def _parameters(target: ExportTarget) -> int:
    """Those that are exported, without rows of padding: neither what only training used nor a head that is left out."""
    kept = (BACKBONE, HEAD, MASK_HEAD) if target.has_head() else (BACKBONE,)
    shapes = {name: shape for name, shape in target.model.shapes.items() if name.startswith(kept)}
    padding = target.model.config.model.padded_vocab_size() - target.vocab_size
    rows = sum(shapes[name][1] for name in (EMBEDDING, HEAD) if name in shapes)
    return sum(map(prod, shapes.values())) - padding * rows


def _table(rows: Mapping[str, str]) -> str:
    cells = {key: value.replace("|", r"\|") for key, value in rows.items()}
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in cells.items())])


def _trained(model: TrainedModel) -> dict[str, str]:
    config, tokens = model.config, model.checkpoint.state.get("tokens")
    shape, batch, optimizer = config.model, config.batch, config.optimizer
    learned = "contrastive weight tying (headless)" if config.objective.name == "headless" else "vanilla softmax"
    seconds = model.checkpoint.state.get("seconds")
    length = [pluralize(model.checkpoint.step, "step")]
    length += [] if tokens is None else [pluralize(tokens, "token")]
    length += [format_duration(seconds)] if isinstance(seconds, int | float) and seconds >= 36 else []
    layers, heads = pluralize(shape.num_layers, "layer"), pluralize(shape.num_heads, "head")
    rows = {
        "Objective": f"{learned}, temperature {model.temperature():g}",
        "Shape": f"{layers}, width {shape.hidden_size}, {heads}",
        "Vocabulary": f"{shape.vocab_size:,} ids",
        "Trained for": ", ".join(length),
        "Batch": f"{batch.global_size:,} rows of {config.data.sequence_length:,} tokens",
        "Optimizer": f"{optimizer.name}, peak rate {optimizer.learning_rate:g}, {config.schedule.name} schedule, "
        f"weight decay {optimizer.weight_decay:g}, {config.engine.precision}",
        "Data": dataset_names(config.data),
        "Held-out text": last_evaluation(model) or "not evaluated",
    }
    if config.init is not None:
        rows["Began from"] = (
            f"{Path(config.init.from_hf or config.init.from_checkpoint or '').name} ({config.init.mode})"
        )
    return rows


def _exported(target: ExportTarget, parity: Parity) -> dict[str, str]:
    errors = ", ".join(f"{error:.1e} in {kind}" for kind, error in parity.largest_error.items())
    return {
        "Head": _head(target.head, target.model.config.objective),
        "Stored as": target.dtype,
        "Largest error": f"{errors}, of {parity.compared} up to {parity.largest_output:.1f}, against the checkpoint",
        "Other programs": served_by(target),
        "Exported by": code_version(),
    }


_HEADS = {
    "none": "none: the backbone alone, outputs are hidden states",
    "tied": "`E h`, the input embedding itself",
    "pmi": "`E h + log q`, training-free: q is the distribution of the training targets (of all candidates, where the "
    "objective has others), ",
    "trained": "the one that was trained",
}
_PADDED = ", and rows of padding that are never probable: their bias is "
_BIASED = ", with a bias for each token, which is "
_FOLDED, _STORED = "folded into the head's own weights", "the head's own"


def _head(head: Head, objective: ObjectiveConfig) -> str:
    place = _STORED if head.bias_V is not None else _FOLDED
    if head.name == "pmi":
        return _HEADS["pmi"] + place
    if head.folded is None and head.bias_V is None:
        return _HEADS[head.name]
    return _HEADS[head.name] + (_BIASED if objective.output_bias else _PADDED) + place


_TOKENIZE = """from transformers import AutoTokenizer, {loader}

tokenizer = AutoTokenizer.from_pretrained({path})
model = {loader}.from_pretrained({path})"""
_GENERATE = """inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(inputs["input_ids"], max_new_tokens=50, do_sample=True)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""
_FILL = """inputs = tokenizer(f"A small {{tokenizer.mask_token}}.", return_tensors="pt")
masked = (inputs["input_ids"] == tokenizer.mask_token_id).nonzero()[0, 1]
print(tokenizer.decode(model(**inputs).logits[0, masked].argmax()))"""
_EMBED = """inputs = tokenizer("Once upon a time", return_tensors="pt")
print(model(inputs["input_ids"]).last_hidden_state.shape)"""
_CALL = """import torch
from transformers import {loader}

model = {loader}.from_pretrained({path})
print(model(torch.tensor([[1, 2, 3]]))[0].shape)  # ids, as this model came without a tokenizer"""

_CARD = """---
library_name: transformers
pipeline_tag: {tag}
{given}tags: [headless, contrastive-weight-tying]
---
# {name}

A {family} model of {parameters} parameters that {does}, pretrained and exported with megahead.

## Training

{trained}

## This export

{exported}

## Use

```python
{program}
```

## Method

N. Godey, E. de la Clergerie, B. Sagot, *Headless Language Models: Learning without Predicting with
Contrastive Weight Tying*, ICLR 2024, arXiv 2309.08351.
"""
