"""A tiny BERT folder of Hugging Face with a WordPiece tokenizer of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel

TEXT = "the cat sat on the mat and the dog saw it is it true that no yes animals run away from rain " * 3


def save_small_encoder(folder: Path, *, dropout: float = 0.1, types: int = 2) -> Path:
    """Two layers of width 32 with random weights, 64 positions."""
    folder.mkdir(parents=True)
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=120, min_frequency=1, show_progress=False)
    tokenizer = BertWordPieceTokenizer(tokenizer.get_vocab())  # joins pairs as BERT does once it has words
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("cls_token", "sep_token", "pad_token", "mask_token", "unk_token")
    content = ", ".join(f'"{name}": "[{name[:-6].upper()}]"' for name in names)
    (folder / "tokenizer_config.json").write_text(f'{{{content}, "tokenizer_class": "PreTrainedTokenizerFast"}}')
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        type_vocab_size=types,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    torch.manual_seed(0)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder
