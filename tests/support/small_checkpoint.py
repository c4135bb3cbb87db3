"""Checkpoints of tiny random models, without training: every norm and bias is off its neutral value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from megahead.checkpoints.store import RetentionRules
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.objectives.pretraining import weight_shapes
from support.saved import save_checkpoint

MODEL = {"num_layers": 2, "hidden_size": 48, "num_heads": 3, "vocab_size": 61, "vocab_multiple": 16}


def small_config(**sections: Any) -> RunConfig:
    """A run of a tiny model; `sections` are merged into the defaults."""
    defaults: dict[str, Any] = {
        "name": "small",
        "model": MODEL,
        "data": {"train": "nowhere", "sequence_length": 32},
        "batch": {"global_size": 4, "micro_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 3},
    }
    return config_from_dict({**defaults, **{key: {**defaults.get(key, {}), **sections[key]} for key in sections}})


def save_small(
    run: Path,
    config: RunConfig,
    seed: int = 0,
    step: int = 3,
    scale: float = 0.3,
    counts: torch.Tensor | None = None,
    **state: Any,
) -> Path:
    """Saves random weights as RUN/checkpoints/step-0000000N, a headless one with counts of its targets; `counts`: of
    the text's tokens, `state`: more of what it remembers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in weight_shapes(config).items():
        spread = scale * torch.randn(shape, generator=generator)
        tensors[f"weight/{name}"] = spread + (1.0 if name.endswith("norm.weight") else 0.0)
    if config.objective.name == "headless":
        rows = config.model.padded_vocab_size()
        tensors["state/target_counts"] = torch.randint(1000, (rows,), generator=generator) ** 2
    if counts is not None:
        tensors["state/dataset_counts"] = counts
    return save_checkpoint(
        run / "checkpoints",
        step,
        tensors.items(),
        state={"step": step, "tokens": 384, **state},
        config=config.model_dump(mode="json"),
        group=Group(),
        rules=RetentionRules(2),
    )


def save_tokenizer(path: Path, text: str = "the cat sat on the mat and the dog saw the cat") -> None:
    """A byte-level BPE of at most 300 ids; 0 ends documents, 1 pads."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 10, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
