"""The tiny runs that the oracle trains: every family, objective and way to shard, by config alone."""

from __future__ import annotations

from typing import Any

Tree = dict[str, Any]

IDS = 60
BASE: Tree = {
    "name": "oracle",
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": IDS, "vocab_multiple": 64},
    "data": {"train": "text", "validation": "text", "sequence_length": 24},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"learning_rate": 3e-3},
    "schedule": {"warmup_steps": 2},
    "training": {
        "steps": 6,
        "log_seconds": 0,
        "evaluate_every": 6,
        "evaluate_samples": 10,
        "checkpoint_every": 3,
        "keep_checkpoints": 9,
    },
    "engine": {"device": "cpu", "deepspeed": {"zero_optimization": {"stage": 0}}},
}
MASKS: Tree = {"masking.mask_token": 60, "masking.cls_token": 61, "masking.sep_token": 62}
BERT: Tree = MASKS | {"model.family": "bert", "model.vocab_size": 63, "model.max_positions": 32}
MODERNBERT: Tree = MASKS | {
    "model.family": "modernbert",
    "model.vocab_size": 63,
    "model.num_layers": 3,
    "model.intermediate_size": 64,
    "model.max_positions": 32,
    "model.local_window": 6,
}
ROWS: Tree = {"engine.embedding": "rows", "optimizer.eps": 1e-4, "data.sequence_length": 6}
MUON: Tree = {"optimizer.name": "muon"}
VANILLA: Tree = {"objective.name": "vanilla"}


def stage(number: int) -> Tree:
    """The change that asks for a ZeRO stage."""
    return {"engine.deepspeed": {"zero_optimization": {"stage": number}}}


CASES: dict[str, tuple[Tree, tuple[int, ...]]] = {
    "gpt_neox": ({}, (1, 2)),
    "zero1_bf16": (stage(1) | {"engine.precision": "bf16"}, (2,)),
    "zero2": (stage(2), (2,)),
    "zero3": (stage(3), (1, 2)),
    "tensor2": ({"parallel.tensor": 2}, (2,)),
    "tensor2_zero1_sequence": (stage(1) | {"parallel.tensor": 2, "parallel.sequence": True}, (2,)),
    "muon": (stage(1) | MUON, (1, 2)),
    "vanilla": (VANILLA, (1, 2)),
    "vanilla_tied": (VANILLA | {"objective.tied": True}, (1,)),
    "phases": ({"objective.schedule.vanilla_share": 0.5}, (1, 2)),
    "group_corrected": ({"objective.bias": "corrected", "objective.group_samples": 8}, (2,)),
    "harmonic": ({"objective.score": "harmonic", "objective.temperature": 0.2, "optimizer.eps": 1e-4}, (1,)),
    "cosine_learned": (
        {"objective.score": "cosine", "objective.temperature": 0.1, "objective.learned_temperature": True},
        (2,),
    ),
    "masked_inputs": ({"model.vocab_size": 61, "masked_inputs": {"mask_token": 60, "share": 0.3}}, (1,)),
    "llama_packed": ({"model.family": "llama", "data.pack": "best_fit"}, (1, 2)),
    "rows": (ROWS, (1,)),
    "rows_zero1_bf16": (ROWS | stage(1) | {"engine.precision": "bf16"}, (2,)),
    "bert": (BERT, (1, 2)),
    "bert_vanilla": (BERT | VANILLA, (1,)),
    "modernbert": (MODERNBERT | stage(3), (1, 2)),
    "modernbert_rows": (MODERNBERT | ROWS | {"data.sequence_length": 12} | stage(1), (2,)),
    "causal_first": (MODERNBERT | {"objective.schedule.causal_share": 0.5}, (1,)),
    "diffusion": (BERT | {"masking.diffusion": True}, (1, 2)),
    "replaced_tokens": (BERT | {"objective.replaced_tokens": {"generator_layers": 1}}, (1, 2)),
    "phrases": (BERT | {"objective.phrases": {"group_samples": 2}}, (1, 2)),
    "retromae": (BERT | {"objective.retromae": {}}, (1, 2)),
    "tsdae": (BERT | {"objective.tsdae": {}}, (1, 2)),
    "multi_token": ({"objective.multi_token": {"heads": 2}}, (1, 2)),
    "dropping": (
        BERT | {"model.num_layers": 4, "masking.dropping": {"from_layer": 1, "keep_share": 0.4}},
        (1, 2),
    ),
    "late_masks": (MODERNBERT | {"masking.rate": 0.4, "masking.masks_from_layer": 2}, (1,)),
    "mask_decoder": (BERT | {"model.num_layers": 3, "masking.rate": 0.4, "masking.mask_decoder_layers": 1}, (1,)),
    "hardest": (BERT | {"masking.strategy": "hardest", "masking.adapt_every": 2}, (2,)),
    "span": (BERT | {"masking.strategy": "span"}, (1,)),
    "frequency": (BERT | {"masking.strategy": "frequency"}, (1,)),
    "pmi": (BERT | {"masking.strategy": "pmi"}, (1,)),
    "bernoulli": (BERT | {"masking.count": "bernoulli"}, (1,)),
}
"""By name: what is changed in BASE (a path of settings: its value), and on how many ranks the run is trained."""

HEADS: dict[str, tuple[str, ...]] = {
    "gpt_neox": ("none", "tied", "pmi"),
    "vanilla": ("none", "trained"),
    "vanilla_tied": ("trained",),
    "phases": ("trained",),
    "llama_packed": ("none", "pmi"),
    "rows": ("pmi",),
    "bert": ("none", "pmi"),
    "bert_vanilla": ("trained",),
    "modernbert": ("none", "pmi"),
    "causal_first": ("none",),
    "diffusion": ("pmi",),
    "replaced_tokens": ("none",),
    "phrases": ("pmi",),
    "retromae": ("pmi",),
    "tsdae": ("pmi",),
}
"""With which heads the run on one rank is exported."""


def tree_of(name: str, output_dir: str) -> Tree:
    """The config of a case."""
    tree: Tree = {section: dict(value) if isinstance(value, dict) else value for section, value in BASE.items()}
    tree["output_dir"] = output_dir
    for path, value in CASES[name][0].items():
        *parents, leaf = path.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return tree
