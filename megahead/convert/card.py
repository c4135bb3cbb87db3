"""The model card of an export."""

from __future__ import annotations

from megahead.config import ObjectiveConfig
from megahead.convert.export_heads import Head
from megahead.convert.export_target import ExportTarget
from megahead.convert.provenance import code_version, dataset_names, last_evaluation
from megahead.convert.verify import Parity
from megahead.wording import counted

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


def model_card(target: ExportTarget, parity: Parity) -> str:
    """README.md of an export."""
    model, config, objective = target.model, target.model.config, target.model.config.objective
    tokens, shape = model.checkpoint.state.get("tokens"), config.model
    learned = "contrastive weight tying (headless)" if objective.name == "headless" else "vanilla softmax"
    errors = ", ".join(f"{error:.1e} in {kind}" for kind, error in parity.largest_error.items())
    loader = target.family.auto_with_head if target.has_head() else "AutoModel"
    facts = {
        "Objective": f"{learned}, temperature {model.temperature():g}",
        "Shape": f"{counted(shape.num_layers, 'layer')}, width {shape.hidden_size}, {counted(shape.num_heads, 'head')}",
        "Trained for": counted(model.checkpoint.step, "step")
        + (f", {counted(tokens, 'token')}" if tokens is not None else ""),
        "Data": dataset_names(config.data),
        "Held-out text": last_evaluation(model) or "not evaluated",
        "Head": _head(target.head, objective),
        "Stored as": target.dtype,
        "Largest error": f"{errors}, of {parity.compared} up to {parity.largest_output:.1f}, against the checkpoint",
        "Exported by": code_version(),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return _CARD.format(name=config.name, table=table, loader=loader, family=target.family.title)


def _head(head: Head, objective: ObjectiveConfig) -> str:
    place = _STORED if head.bias_V is not None else _FOLDED
    if head.name == "pmi":
        return _HEADS["pmi"] + place
    if head.folded is None and head.bias_V is None:
        return _HEADS[head.name]
    return _HEADS[head.name] + (_BIASED if objective.output_bias else _PADDED) + place


_CARD = """---
library_name: transformers
tags: [headless, contrastive-weight-tying]
---
# {name}

A {family} model, pretrained and exported with megahead.

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
