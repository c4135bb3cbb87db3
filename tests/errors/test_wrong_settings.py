"""The settings a user can get wrong, and the sentence each mistake prints, word for word; those of encoders have a file
of their own."""

# ruff: noqa: E501 - a sentence stands on one line, as it is printed
from __future__ import annotations

from typing import Any

import pytest

from support.good_settings import LLAMA, assert_told

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model.hiden_size": 3}, "`model.hiden_size` is not a setting; did you mean `model.hidden_size`?"),
    ({"modle.size": "x"}, "`modle` is not a setting; did you mean `model`?"),
    ({"training.steps": None}, "`training.steps` must be a whole number, but is empty instead."),
    ({"training.steps": 1.5}, "`training.steps` must be a whole number, but is 1.5 instead."),
    (
        {"training.replicate_every": 1000, "training.checkpoint_every": 1000},
        "`training.replicate_every` must be below training.checkpoint_every (1000), but is 1000 instead; a replica in memory is of use where it is newer than the checkpoint on disk.",
    ),
    ({"training.replicate_every": 0}, "`training.replicate_every` must be greater than 0, but is 0 instead."),
    (
        {"training.keep_best": 2, "data.validation": None},
        "`training.keep_best` must be left out without data.validation, whose loss it compares, but is 2 instead.",
    ),
    ({"training.steps": 0}, "`training.steps` must be greater than 0, but is 0 instead."),
    ({"optimizer.learning_rate": "fast"}, "`optimizer.learning_rate` must be a number, but is 'fast' instead."),
    (
        {"optimizer.learning_rate": float("nan")},
        "`optimizer.learning_rate` must be a finite number, but is nan instead.",
    ),
    ({"optimizer.betas": 0.9}, "`optimizer.betas` must be a list, but is 0.9 instead."),
    (
        {"optimizer.betas": [0.9, 0.99, 0.5]},
        "`optimizer.betas` must be a list of at most 2, but is [0.9, 0.99, 0.5] instead.",
    ),
    ({"engine.compile": "x"}, "`engine.compile` must be true or false or 'auto', but is 'x' instead."),
    (
        {"schedule.warmup_steps": "x"},
        "`schedule.warmup_steps` must be a whole number or a number, but is 'x' instead.",
    ),
    ({"training.steps": 1e30}, "`training.steps` must be a smaller number, but is 1e+30 instead."),
    (
        {"resume": {True: 1}},
        "`resume.True` is not a setting; known here: allow.",
    ),
    (
        {"data.isolate_documents": "perhaps"},
        "`data.isolate_documents` must be true or false, but is 'perhaps' instead.",
    ),
    ({"data.train": 7}, "`data.train` must be text, but is 7 instead."),
    (
        {"data.validation": "~/text"},
        "`data.validation` must be written out, but is '~/text' instead; no shell expands settings; name the folder itself.",
    ),
    (
        {"output_dir": "/scratch/$USER/run"},
        "`output_dir` must be written out, but is '/scratch/$USER/run' instead; no shell expands settings; name the folder itself.",
    ),
    (
        {"objective.custom": {"objective": "mine.py:Mine", "settings": {"at": {"url": "s3://key:word@bucket/x"}}}},
        "`objective.custom.settings` must be an address without password, key or query, but is one that has some instead; give credentials by the environment, as the store's own tools read them.",
    ),
    ({"data.validation": "a\x00b"}, "`data.validation` must have no zero byte, but is 'a\\x00b' instead."),
    ({"engine.deepspeed": 7}, "`engine.deepspeed` must be text or a section of settings, but is 7 instead."),
    (
        {"faults.spike": "ignore"},
        "`faults.spike` must be 'note', 'skip', 'rollback' or 'stop', but is 'ignore' instead.",
    ),
    ({"model": 7}, "`model` must be a section of settings, but is 7 instead."),
    ({"objective.multi_token": {"heads": 0}}, "`objective.multi_token.heads` must be at least 1, but is 0 instead."),
    (
        {"objective.multi_token": {"heads": 128}},
        "`objective.multi_token.heads` must be below data.sequence_length (128), but is 128 instead.",
    ),
    (
        {"objective.multi_token": {}, "objective.schedule": {"vanilla_share": 0.5}},
        "`objective.schedule` must be left out with objective.multi_token, whose heads learn from the first step to the last, but is given instead.",
    ),
    (
        {"name": "a/b"},
        "`name` must consist of letters, digits, dots, dashes and underscores, and not of dots alone, but is 'a/b' instead.",
    ),
    (
        {"name": ".."},
        "`name` must consist of letters, digits, dots, dashes and underscores, and not of dots alone, but is '..' instead.",
    ),
    ({"name": ""}, "`name` must not be empty, but is '' instead."),
    ({"seed": -1}, "`seed` must be at least 0, but is -1 instead."),
    (
        {"model.size": "pythia-15m"},
        "`model.size` must be one of pythia-14m, pythia-31m, pythia-70m, pythia-160m, pythia-410m, pythia-1b, pythia-1.4b, pythia-2.8b, pythia-6.9b, pythia-12b, llama-15m, llama-60m, llama-130m, llama-350m, llama-1b, llama-3b, llama-8b, qwen2-0.5b, qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gemma-3-270m, gemma-3-1b, bert-base, bert-small, bert-mini, bert-tiny, distilbert-multilingual, roberta-base, roberta-large, xlm-r-base, xlm-r-large, modernbert-15m, modernbert-base, modernbert-large, mmbert-small, mmbert-base, but is 'pythia-15m' instead; did you mean `pythia-31m`?",
    ),
    (
        {"model.size": {"a": 1}},
        "`model.size` must be one of pythia-14m, pythia-31m, pythia-70m, pythia-160m, pythia-410m, pythia-1b, pythia-1.4b, pythia-2.8b, pythia-6.9b, pythia-12b, llama-15m, llama-60m, llama-130m, llama-350m, llama-1b, llama-3b, llama-8b, qwen2-0.5b, qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gemma-3-270m, gemma-3-1b, bert-base, bert-small, bert-mini, bert-tiny, distilbert-multilingual, roberta-base, roberta-large, xlm-r-base, xlm-r-large, modernbert-15m, modernbert-base, modernbert-large, mmbert-small, mmbert-base, but is {'a': 1} instead; or leave it out and give the shape.",
    ),
    ({"model.num_heads": 3}, "`model.hidden_size` must be a multiple of num_heads (3), but is 128 instead."),
    (
        {"model.rotary_pct": 0.1},
        "`model.rotary_pct` must rotate an even number of each head's 32 dimensions, but is 0.1 (3 dimensions) instead.",
    ),
    ({"model.token_types": 2}, "`model.token_types` must be left out of a gpt_neox, but is 2 instead."),
    ({"model.num_key_heads": 2}, "`model.num_key_heads` must be left out of a gpt_neox, but is 2 instead."),
    ({"model.activation": "silu"}, "`model.activation` must be gelu or gelu_tanh in a gpt_neox, but is silu instead."),
    (LLAMA | {"model.rotary_pct": 0.5}, "`model.rotary_pct` must be left out of a llama, but is 0.5 instead."),
    (LLAMA | {"model.num_key_heads": 3}, "`model.num_key_heads` must divide num_heads (4), but is 3 instead."),
    (
        LLAMA | {"model.qk_norm": True, "model.attention_bias": "qkv"},
        "`model.qk_norm` must be false with attention_bias: qkv, which no published model has together, but is true instead.",
    ),
    (
        LLAMA | {"model.mlp_bias": True, "model.attention_bias": "qkv"},
        "`model.mlp_bias` must be false with attention_bias: qkv, as in Qwen 2, but is true instead.",
    ),
    (
        LLAMA | {"model.rotary_scaling": {"kind": "linear", "factor": 2, "original_positions": 64}},
        "`model.rotary_scaling.original_positions` must be left out of `linear` scaling, but is 64 instead.",
    ),
    (
        LLAMA | {"model.rotary_scaling": {"kind": "llama3", "factor": 2, "low_frequency_factor": 4}},
        "`model.rotary_scaling.high_frequency_factor` must be above low_frequency_factor (4), but is 4 instead.",
    ),
    (
        LLAMA | {"model.rotary_scaling": {"kind": "yarn", "factor": 2}},
        "`model.rotary_scaling.kind` must be 'linear' or 'llama3', but is 'yarn' instead.",
    ),
    ({"model.vocab_size": 1}, "`model.vocab_size` must be greater than 1, but is 1 instead."),
    (
        {"data.sequence_length": 4096},
        "`data.sequence_length` must be at most model.max_positions (2048), but is 4096 instead.",
    ),
    ({"data.end_token": 60000}, "`data.end_token` must be below model.vocab_size (50277), but is 60000 instead."),
    ({"data.train": []}, "`data.train` must name at least one dataset, but is an empty list instead."),
    ({"data.train": [{"prefix": "a", "weight": 0}]}, "`data.train.0.weight` must be greater than 0, but is 0 instead."),
    (
        {"data.train": [{"prefix": "a", "weight": 1}, {"prefix": "b"}]},
        "`data.train` must give every dataset a weight, or none, but is a mixture of both instead.",
    ),
    (
        {"data.train": [{"weight": 1}]},
        "`data.train.0.prefix` must be given, but is missing (Prefix of the dataset).",
    ),
    (
        {"data.train": [{"prefix": "a", "wieght": 1}]},
        "`data.train.0.wieght` is not a setting; did you mean `data.train.0.weight`?",
    ),
    (
        {"data.order": "stored", "data.pack": "best_fit"},
        "`data.pack` must be `stream` with order: stored, whose rows are ready, but is `best_fit` instead.",
    ),
    (
        {"data.documents_a_row": 4},
        "`data.documents_a_row` must be left out unless pack is `best_fit`, but is 4 instead.",
    ),
    (
        {"objective.score": "harmonic", "objective.learned_temperature": True},
        "`objective.learned_temperature` must be left out with score: harmonic, but is True instead.",
    ),
    (
        {"objective.score": "euclidean"},
        "`objective.score` must be 'dot', 'cosine' or 'harmonic', but is 'euclidean' instead.",
    ),
    (
        {
            "objective.score": "cosine",
            "tasks": {"names": ["blimp"], "data": "x", "every": 5},
            "data.tokenizer": "t.json",
        },
        "`tasks` must be left out of a run that scores by `cosine`, whose exports have no head, but is given instead.",
    ),
    (
        {
            "model.family": "llama",
            "model.qk_norm": True,
            "tasks": {"names": ["blimp"], "data": "x", "every": 5},
            "data.tokenizer": "t.json",
        },
        "`tasks` must be left out with norms of queries and keys (Qwen 3, Gemma 3), unless objective.bias is corrected: no class of transformers has a training-free head beside them, but is given instead.",
    ),
    *(
        (
            {
                **LLAMA,
                "model.qk_norm": True,
                "model.mlp_bias": False,
                "objective": objective,
                "tasks": {"names": ["blimp"], "data": "x", "every": 5},
                "data.tokenizer": "t.json",
            },
            f"`tasks` must be left out with norms of queries and keys (Qwen 3, Gemma 3) and objective.{field}: no class of transformers has a head with a bias beside them, but is given instead.",
        )
        for field, objective in (
            ("output_bias", {"name": "vanilla", "output_bias": True}),
            ("schedule.vanilla_share", {"bias": "corrected", "schedule": {"vanilla_share": 0.5}}),
        )
    ),
    (
        {"objective.nearest": 4, "objective.bias": "corrected"},
        "`objective.nearest` must be left out: hard negatives and similar words made models worse, and were removed, but is 4 instead; the last version that has it is commit 6e15e94 of megahead 0.1.0.",
    ),
    (
        {"data.nearest_ids": "ids.npy"},
        "`data.nearest_ids` must be left out: hard negatives and similar words made models worse, and were removed, but is ids.npy instead; the last version that has it is commit 6e15e94 of megahead 0.1.0.",
    ),
    ({"objective.temperature": 0}, "`objective.temperature` must be greater than 0, but is 0 instead."),
    (
        {"objective.group_samples": "everything"},
        "`objective.group_samples` must be a positive number of samples or micro_batch, data_parallel, global_batch, but is everything instead.",
    ),
    (
        {"objective.tied": True},
        "`objective.tied` must be left out of a headless objective without vanilla_weight, but is True instead.",
    ),
    (
        {"objective.candidates": "own", "objective.tied": True, "objective.vanilla_weight": 0.1},
        "`objective.tied` must be left out with candidates: own, whose table is the head, but is True instead.",
    ),
    (
        {"objective.candidates": "own", "objective.name": "vanilla"},
        "`objective.candidates` must be left out of a vanilla objective, but is own instead; use name: headless.",
    ),
    (
        {"objective.candidates": "own", "engine.embedding": "rows"},
        "`engine.embedding` must be `dense` with objective.candidates: own, whose table is dense, but is `rows` instead.",
    ),
    (
        {"objective": {"name": "vanilla", "negatives_from": "uniform"}},
        "`objective.negatives_from` must be left out of a vanilla objective, but is uniform instead; use name: headless.",
    ),
    (
        {"objective.negatives_from": "uniform"},
        "`objective.negatives_from` must be left out without negatives, but is uniform instead; set negatives.",
    ),
    ({"objective.vanilla_weight": 1}, "`objective.vanilla_weight` must be less than 1, but is 1 instead."),
    (
        {"objective.name": "vanilla", "objective.bias": "once"},
        "`objective.bias` must be left out of a vanilla objective, but is once instead; use name: headless.",
    ),
    (
        {"objective.name": "vanilla", "objective.negatives": 5},
        "`objective.negatives` must be left out of a vanilla objective, but is 5 instead; use name: headless.",
    ),
    (
        {"schedule.name": "wsd"},
        "`schedule.decay_steps` must be given for the wsd schedule, but is missing; try a tenth of all steps.",
    ),
    ({"schedule.decay_steps": 3}, "`schedule.decay_steps` must be left out for the cosine schedule, but is 3 instead."),
    (
        {"schedule.warmup_steps": 1.5},
        "`schedule.warmup_steps` must be a whole number, or a share below 1 of training.steps, but is 1.5 instead.",
    ),
    ({"schedule.warmup_steps": -0.1}, "`schedule.warmup_steps` must be at least 0, but is -0.1 instead."),
    (
        {"schedule.warmup_steps": 101},
        "`schedule.warmup_steps` must leave its warm-up and decay within training.steps (100), but is 101 + 0 instead; "
        "a share, such as 0.01, follows training.steps.",
    ),
    (
        {"model.family": "xlm_roberta", "masking": {"mask_token": 4, "cls_token": 2, "sep_token": 3}}
        | {"parallel.tensor": 2, "parallel.sequence": True},
        "`parallel.sequence` must be false for model.family xlm_roberta, but is true instead.",
    ),
    ({"parallel.tensor": 3}, "`parallel.tensor` must divide the model's num_heads (4), but is 3 instead."),
    (
        {"parallel.tensor": 4, "parallel.sequence": True, "data.sequence_length": 126},
        "`data.sequence_length` must be a multiple of parallel.tensor (4) under parallel.sequence, but is 126 instead.",
    ),
    (
        {"init": {"mode": "probe"}},
        "`init.from_checkpoint` must be given, or else from_hf, but is missing.",
    ),
    (
        {"init": {"from_checkpoint": "a", "from_hf": "b"}},
        "`init.from_checkpoint` must be given, or else from_hf, but is given beside it instead.",
    ),
    (
        {"init.from_checkpoint": "runs/x"},
        "`init.mode` must be `continue` or `table` unless the objective has a head beside the embedding, but is 'finetune' instead; set objective.name=vanilla, which trains the head.",
    ),
    (
        {"resume.allow": ["learning_rate"]},
        "`resume.allow` must name settings or their sections, but is 'learning_rate' instead; write optimizer.learning_rate, or schedule.",
    ),
    (
        {"tasks": {"names": ["sciq"], "data": "data", "every": 5}},
        "`data.tokenizer` must name the tokenizer that `tasks` are read with, but is missing.",
    ),
    ({"tasks": {"names": [], "data": "data", "every": 5}}, "`tasks.names` must not be empty, but is [] instead."),
    (
        {"optimizer.table.rule": "adagrad", "engine.embedding": "dense"},
        "`optimizer.table.rule` must be adamw where the embedding is dense, but is adagrad instead.",
    ),
    (
        {"optimizer.muon.momentum": 0.9},
        "`optimizer.muon` must be left out with name: adamw, but is given instead; set name: muon.",
    ),
    (
        {"objective.schedule": {"vanilla_share": 0.2}, "objective.name": "vanilla"},
        "`objective.schedule.vanilla_share` must be left out of a vanilla objective, but is given instead; use name: headless.",
    ),
    (
        {"objective.schedule": {"vanilla_share": 0.2}, "objective.vanilla_weight": 0.5},
        "`objective.schedule.vanilla_share` must be left out with vanilla_weight, whose head is trained from the beginning, but is given instead.",
    ),
    (
        {"objective.schedule": {"vanilla_share": 0.001}},
        "`objective.schedule.vanilla_share` must leave both objectives a step of training.steps (100), but is 0.001 instead.",
    ),
    (
        {"objective.schedule": {"vanilla_share": 0.2}, "engine.embedding": "rows", "optimizer.table.rule": "adagrad"},
        "`optimizer.table.rule` must be adamw with objective.schedule.vanilla_share, whose last phase updates all rows, but is adagrad instead.",
    ),
    (
        {"objective.output_bias": True},
        "`objective.output_bias` must be left out of a headless objective, but is True instead.",
    ),
    (
        {"objective.name": "vanilla", "engine.embedding": "rows"},
        "`engine.embedding` must be `dense` with a softmax over the vocabulary, which updates each row at each step, but is `rows` instead.",
    ),
    (
        {"objective.name": "vanilla", "optimizer.table.rule": "adagrad"},
        "`optimizer.table.rule` must be adamw where the embedding is dense, but is adagrad instead.",
    ),
    (
        {"objective.vanilla_weight": 0.5, "engine.embedding": "rows"},
        "`engine.embedding` must be `dense` with a softmax over the vocabulary, which updates each row at each step, but is `rows` instead.",
    ),
    (
        {"optimizer.betas": [0.5, 0.3], "engine.embedding": "rows"},
        "`optimizer.betas` must have a first of at most the second, and 0.98 times its root, with engine.embedding: rows, but is [0.5, 0.3] instead; or set optimizer.table.rule=adagrad.",
    ),
    (
        {"optimizer.table.learning_rate_ratio": 1e6, "engine.embedding": "rows"},
        "`optimizer.table.learning_rate_ratio` must leave a part of a weight at each step (learning_rate * weight_decay * ratio below 1), but is 1000000.0 instead.",
    ),
    ({"engine.precision": "fp8"}, "`engine.precision` must be 'auto', 'fp32', 'bf16' or 'fp16', but is 'fp8' instead."),
]


@pytest.mark.parametrize(("changes", "sentence"), MISTAKES)
def test_a_wrong_setting_earns_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert_told(changes, sentence)
