"""What can be wrong with what an encoder learns by: replaced tokens, phrases, files of ids, next tokens first; and the
sentence each mistake prints, word for word."""

# ruff: noqa: E501 - a sentence stands on one line, as it is printed
from __future__ import annotations

from typing import Any

import pytest

from support.good_settings import BERT, LLAMA, MASKS, assert_told

MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"objective.replaced_tokens": {}},
        "`objective.replaced_tokens` must be left out where next tokens are learned: those that are replaced are an encoder's masked tokens, but is given instead.",
    ),
    (
        BERT | {"masking": MASKS, "model.is_causal": True, "objective.replaced_tokens": {}},
        "`objective.replaced_tokens` must be left out where next tokens are learned: those that are replaced are an encoder's masked tokens, but is given instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective.replaced_tokens": {"generator_layers": 3}},
        "`objective.replaced_tokens.generator_layers` must be at most model.num_layers (2), but is 3 instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective": {"name": "vanilla", "replaced_tokens": {"draws": "vocabulary"}}},
        "`objective.replaced_tokens.draws` must be left out of a vanilla objective, whose tokens are always drawn from all ids, but is vocabulary instead.",
    ),
    *(
        (
            BERT | {"masking": MASKS, "objective.replaced_tokens": {}} | changes,
            f"`{field}` must be left out with objective.replaced_tokens, {reason} instead.",
        )
        for field, changes, reason in (
            (
                "masking.diffusion",
                {"masking": MASKS | {"diffusion": True}},
                "whose model predicts no tokens, but is True",
            ),
            (
                "masking.masks_from_layer",
                {"masking": MASKS | {"masks_from_layer": 1}},
                "whose model reads all tokens, and no mask tokens, but is 1",
            ),
            (
                "masking.mask_decoder_layers",
                {"masking": MASKS | {"mask_decoder_layers": 1}},
                "whose model reads all tokens, and no mask tokens, but is 1",
            ),
            (
                "masking.dropping",
                {"masking": MASKS | {"dropping": {"from_layer": 0}}},
                "whose model reads all tokens, and no mask tokens, but is given",
            ),
            (
                "objective.schedule",
                {"objective.schedule": {"causal_share": 0.5}},
                "by which generator and model learn side by side, but is given",
            ),
            (
                "objective.vanilla_weight",
                {"objective.vanilla_weight": 0.1},
                "whose generator has one head, but is 0.1",
            ),
            (
                "objective.candidates",
                {"objective.candidates": "own"},
                "whose model reads the candidates' rows as inputs, but is own",
            ),
            (
                "init.from_hf",
                {"init": {"from_hf": "bert", "mode": "continue"}},
                "whose generator is in no such folder, but is bert",
            ),
            (
                "training.keep_best",
                {"training.keep_best": 1},
                "where held-out loss is the generator's and not the model's, but is 1",
            ),
        )
    ),
    (
        BERT | {"masking": MASKS, "objective.replaced_tokens": {}, "engine.embedding": "rows"},
        "`engine.embedding` must be `dense` with objective.replaced_tokens, whose held-out tokens are drawn from all ids at once, but is `rows` instead.",
    ),
    (
        BERT
        | {
            "masking": MASKS,
            "objective.replaced_tokens": {},
            "tasks": {"every": 5, "names": ["blimp"]},
            "data.tokenizer": "t.json",
        },
        "`tasks` must be left out of a run that detects replaced tokens and predicts no tokens, whose exports have no head, but is given instead.",
    ),
    *(
        (
            changes | {"objective.phrases": {}},
            "`objective.phrases` must be left out where next tokens are learned: phrases are masked in an encoder's rows, but is given instead.",
        )
        for changes in ({}, BERT | {"masking": MASKS, "model.is_causal": True})
    ),
    *(
        (
            BERT | {"masking": MASKS, "objective.multi_token": {}} | changes,
            "`objective.multi_token` must be left out of an encoder: heads read earlier tokens alone, but is given instead.",
        )
        for changes in ({}, {"model.is_causal": True})
    ),
    *(
        (
            changes | {f"objective.{decoder}": {}},
            f"`objective.{decoder}` must be left out where next tokens are learned: [CLS] comes first and reads no text there, but is given instead.",
        )
        for decoder in ("retromae", "tsdae")
        for changes in ({}, BERT | {"masking": MASKS, "model.is_causal": True})
    ),
    *(
        (
            BERT | {"masking": MASKS, f"objective.{decoder}": {}} | changes,
            f"`{field}` must be left out with objective.{decoder}, whose decoder reads the text and learns from the first step to the last, but is {value} instead.",
        )
        for decoder in ("retromae", "tsdae")
        for field, changes, value in (
            ("objective.schedule", {"objective.schedule": {"vanilla_share": 0.5}}, "given"),
            ("masking.diffusion", {"masking": MASKS | {"diffusion": True}}, "True"),
            ("masking.noise_share", {"masking": MASKS | {"noise_share": 0.1}}, "0.1"),
        )
    ),
    *(
        (
            BERT | {"masking": MASKS | {"mask_decoder_layers": 1}, f"objective.{decoder}": {}},
            f"`masking.mask_decoder_layers` must be left out with objective.{decoder}, whose decoder would read [CLS] after these layers, which are not exported, but is 1 instead.",
        )
        for decoder in ("retromae", "tsdae")
    ),
    (
        BERT | {"masking": MASKS, "objective.tsdae": {"deletion_rate": 1}},
        "`objective.tsdae.deletion_rate` must be less than 1, but is 1 instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective.retromae": {}, "objective.tsdae": {}},
        "`objective.tsdae` must be left out with retromae: a run has one auxiliary objective, but is given instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective.phrases": {}, "objective.replaced_tokens": {}},
        "`objective.replaced_tokens` must be left out with phrases: a run has one auxiliary objective, but is given instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective.phrases": {}, "objective.schedule": {"causal_share": 0.5}},
        "`objective.schedule` must be left out with phrases, which the model itself learns from the first step to the last, but is given instead.",
    ),
    (
        BERT | {"masking": MASKS | {"diffusion": True}, "objective.phrases": {}},
        "`masking.diffusion` must be left out with objective.phrases, which are masked whole, but is True instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective.phrases": {"group_samples": 3}},
        "`objective.phrases.group_samples` must divide batch.micro_size (2), but is 3 instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective.phrases": {"shortest": 5, "longest": 4}},
        "`objective.phrases.longest` must be at least shortest (5), but is 4 instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective.phrases": {"group_samples": 2, "shortest": 4}},
        "`objective.phrases.shortest` must be at most a row's number of targets (2), but is 4 instead; raise masking.rate.",
    ),
    ({"masking": MASKS}, "`masking` must be left out of a decoder, but is given instead."),
    (BERT, "`masking` must be given for an encoder, but is missing; name mask_token, cls_token and sep_token."),
    (
        BERT | {"masking": MASKS | {"cls_token": 3}},
        "`masking.mask_token` must differ from the row's other special tokens, but is 3 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_token": 50}},
        "`masking` must name ids below model.vocab_size (50), but is 50 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_token": 2, "sep_token": 4}},
        "`masking.mask_token` must differ from data.end_token, but is 2 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"cls_token": 2, "sep_token": 4}},
        "`masking.cls_token` must differ from data.end_token, but is 2 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_share": 0.95}},
        "`masking.random_share` must leave the sum with mask_share (0.95) at most 1, but is 0.1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"strategy": "whole_word"}},
        "`data.tokenizer` must be given to find whole words (masking.strategy), but is missing.",
    ),
    (
        BERT | {"masking": MASKS} | {"data.order": "stored"},
        "`data.order` must be `shuffled` for an encoder, but is `stored` instead.",
    ),
    (
        BERT | {"masking": MASKS} | {"data.sequence_length": 3},
        "`data.sequence_length` must have room for text between [CLS] and [SEP], but is 3 instead.",
    ),
    (
        BERT | {"masking": MASKS} | {"init": {"from_checkpoint": "x", "mode": "probe"}},
        "`init.mode` must be `continue` or `table` for an encoder, but is 'probe' instead.",
    ),
    (
        BERT | {"masking": MASKS | {"strategy": "weights"}},
        "`data.id_weights` must be given with masking.strategy or masking.dropping.by: weights, but is missing.",
    ),
    (
        BERT | {"masking": MASKS | {"strategy": "frequency"}, "data.id_weights": "weights.npy"},
        "`data.id_weights` must be left out without masking.strategy or masking.dropping.by: weights, but is weights.npy instead.",
    ),
    (
        BERT | {"masking": MASKS | {"similar_share": 0.2}},
        "`masking.similar_share` must be left out: hard negatives and similar words made models worse, and were removed, but is 0.2 instead; the last version that has it is commit 6e15e94 of megahead 0.1.0.",
    ),
    (
        {"objective.schedule": {}},
        "`objective.schedule.causal_share` must be given, or vanilla_share, but is missing; or leave schedule out.",
    ),
    (
        BERT | {"masking": MASKS, "objective.schedule": {"causal_share": 0.001}},
        "`objective.schedule.causal_share` must leave both objectives a step of training.steps (100), but is 0.001 instead.",
    ),
    (
        {"objective.schedule": {"causal_share": 0.5}},
        "`objective.schedule.causal_share` must be left out of a gpt_neox, where all steps are causal, but is 0.5 instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective.schedule": {"causal_share": 0.5}, "model.is_causal": True},
        "`objective.schedule.causal_share` must be left out with model.is_causal: true, where all steps are causal, but is 0.5 instead.",
    ),
    (LLAMA | {"model.is_causal": False}, "`model.is_causal` must be left out of a llama, but is False instead."),
    (
        BERT | {"model.is_causal": True},
        "`masking` must be given for an encoder, but is missing; name mask_token, cls_token and sep_token.",
    ),
    (
        BERT | {"masking": MASKS | {"masks_from_layer": 1}, "model.is_causal": True},
        "`masking.masks_from_layer` must be left out with model.is_causal: nothing is masked where next tokens are learned, but is 1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"masks_from_layer": 1}, "objective.schedule": {"causal_share": 0.5}},
        "`masking.masks_from_layer` must be left out with objective.schedule.causal_share: nothing is masked where next tokens are learned, but is 1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"strategy": "hardest"}, "objective.schedule": {"causal_share": 0.5}},
        "`masking.strategy` must be one that does not follow errors at masked tokens: with objective.schedule.causal_share none are masked at first, but is hardest instead.",
    ),
    (
        BERT
        | {"masking": MASKS, "objective.schedule": {"causal_share": 0.5}, "data.tokenizer": "t.json"}
        | {"tasks": {"names": ["blimp"], "data": "data", "every": 5}},
        "`tasks` must be left out of a run whose encoder is causal at first or throughout: tasks need a model of masked tokens, but is given instead.",
    ),
    (
        BERT | {"masking": MASKS, "objective.schedule": {"causal_share": 0.5}, "training.keep_best": 1},
        "`training.keep_best` must be left out with objective.schedule.causal_share: losses of next and of masked tokens cannot be compared, but is 1 instead.",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), MISTAKES)
def test_what_an_encoder_cannot_learn_by_earns_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert_told(changes, sentence)
