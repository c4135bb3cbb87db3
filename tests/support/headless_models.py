"""Small models of transformers to be headless, rows for them, and a `Trainer` that has trained one."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)

from megahead.data.batch import Batch
from megahead.data.train_tokenizer import save_tokenizer, train_wordpiece

IDS = 60

SHAPE = {
    "vocab_size": IDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}

SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, tuple[Any, Any]] = {
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE, eos_token_id=0)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, num_key_value_heads=2, eos_token_id=0, bos_token_id=0)),
    "bert": (BertForMaskedLM, BertConfig(**SHAPE, **STILL, max_position_embeddings=32)),
    "roberta": (
        RobertaForMaskedLM,
        RobertaConfig(**SHAPE, **STILL, max_position_embeddings=33, type_vocab_size=1, pad_token_id=0),
    ),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig(**SHAPE, local_attention=8, **SPECIAL)),
}

ENCODERS = {"bert", "roberta", "modernbert"}


def build(name: str) -> PreTrainedModel:
    kind, config = MODELS[name]
    model, generator = kind(deepcopy(config)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(spread + (1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0))
    return model


def rows_of(name: str, seed: int = 0, rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    """Input ids and labels, of which some are -100: a different number in each row."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(1, IDS, (rows, length), generator=generator)
    labels_BT = ids_BT.clone()
    if name in ENCODERS:
        labels_BT[torch.rand(ids_BT.shape, generator=generator) > 0.3] = -100
    for row in range(rows):
        labels_BT[row, length - row :] = -100
    return {"input_ids": ids_BT, "labels": labels_BT}


def our_batch(name: str, rows: dict[str, Tensor]) -> Batch:
    ids_BT, labels_BT = rows["input_ids"], rows["labels"]
    if name not in ENCODERS:
        ids_BT, labels_BT = ids_BT[:, :-1], labels_BT[:, 1:]
    chosen = labels_BT.flatten() != -100
    return Batch(ids_BT, None, chosen.nonzero().flatten(), labels_BT.flatten()[chosen])


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    trained = train_wordpiece(["the cat saw the rat and the dog"], IDS)
    save_tokenizer(trained, folder / "words.json")
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "words.json"), **names)


def trained(folder: Path, model: Any, name: str, **settings: Any) -> Trainer:
    """A Trainer of two steps of four rows, plain gradient descent, that has done its work."""
    arguments = TrainingArguments(
        str(folder / "trainer"),
        **{"max_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4} | settings,
        use_cpu=True,
        report_to=[],
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        learning_rate=0.1,
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    )
    rows = [{key: value[row] for key, value in rows_of(name, rows=8).items()} for row in range(8)]
    optimizer = None if arguments.deepspeed else torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    return trainer
