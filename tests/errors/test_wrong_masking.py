"""What can be wrong with masked tokens, in encoders and decoders, and the sentence each mistake prints, word for word."""

# ruff: noqa: E501 - a sentence stands on one line, as it is printed
from __future__ import annotations

from typing import Any

import pytest

from support.good_settings import BERT, MASKS, assert_told

MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"masked_inputs": {"mask_token": 50277}},
        "`masked_inputs.mask_token` must be below model.vocab_size (50277), but is 50277 instead; for an id beyond the tokenizer's set model.vocab_size=50278.",
    ),
    (
        {"masked_inputs": {"mask_token": 0}},
        "`masked_inputs.mask_token` must differ from data.end_token, but is 0 instead.",
    ),
    (
        BERT | {"masking": MASKS, "model.token_types": 0, "model.norm_eps": 1e-5},
        "`model.norm_eps` must be 1e-12 in a DistilBERT (model.token_types 0), but is 1e-05 instead; leave it out, or set model.token_types=2.",
    ),
    (
        BERT | {"masking": MASKS, "masked_inputs": {"mask_token": 3}},
        "`masked_inputs` must be left out of an encoder, but is given instead; it has `masking`.",
    ),
    (
        {"masked_inputs": {"mask_token": 50276, "share": 0.001}},
        "`masked_inputs.share` must mask a token of a row of data.sequence_length (128), but is 0.001 instead; set at least 0.0078, or leave masked_inputs out.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_share": 0, "random_share": 0}},
        "`masking.mask_share` must be above 0, or random_share, for targets that are not all read as they are, but is 0 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"rate": 0.03}},
        "`masking.rate` must leave a row of data.sequence_length (16) a target, but is 0.03 instead; set at least 0.071.",
    ),
    (
        BERT | {"masking": MASKS | {"rate": 0.3, "final_rate": 0.01}},
        "`masking.final_rate` must leave a row of data.sequence_length (16) a target, but is 0.01 instead; set at least 0.071.",
    ),
    *(
        (
            BERT | {"masking": MASKS | masking | {field: value}},
            f"`masking.{field}` must be left out without masking.{who}, but is {value} instead.",
        )
        for masking, field, value, who in (
            ({}, "span_stop", 0.5, "strategy: span"),
            ({"strategy": "frequency"}, "longest_span", 4, "strategy: span or pmi or whole_word"),
            ({"strategy": "span"}, "frequency_power", 1.0, "strategy or masking.dropping.by: frequency"),
            (
                {"dropping": {"from_layer": 0, "by": "informative"}},
                "adapt_every",
                7,
                "strategy or masking.dropping.by: hardest",
            ),
            ({"strategy": "informative"}, "least_pmi", 1.0, "strategy: pmi"),
            ({"strategy": "hardest"}, "least_count", 3, "strategy or masking.dropping.by: pmi or informative"),
            ({"diffusion": True}, "span_stop", 0.5, "strategy: span"),
        )
    ),
    *(
        (
            BERT | {"masking": MASKS | {field: value}, "model.is_causal": True},
            f"`masking.{field}` must be left out with model.is_causal: nothing is masked where next tokens are learned, but is {value} instead.",
        )
        for field, value in {"diffusion": True, "rate": 0.4, "strategy": "frequency", "span_stop": 0.5}.items()
    ),
    (
        BERT | {"masking": MASKS | {"strategy": "spam"}},
        "`masking.strategy` must be one of uniform, whole_word, span, frequency, informative, hardest, pmi, weights, or name a class, but is 'spam' instead; did you mean `span`?",
    ),
    (
        BERT | {"masking": MASKS | {"mask_share": 0.7}} | {"model.is_causal": True},
        "`masking.mask_share` must be left out with model.is_causal: nothing is masked where next tokens are learned, but is 0.7 instead.",
    ),
    *(
        (
            BERT | {"masking": MASKS | {"final_rate": 0.05}, "objective": objective},
            f"`masking.final_rate` must be left out with objective.{counted}, whose training-free head assumes a constant number of targets, but is 0.05 instead.",
        )
        for objective, counted in (({"bias": "once"}, "bias: once"), ({"negatives": 8}, "negatives"))
    ),
    (
        BERT | {"masking": MASKS | {"noise_share": 0.1}, "objective.replaced_tokens": {"generator_layers": 1}},
        "`masking.noise_share` must be left out with objective.replaced_tokens, whose model finds all tokens that are not the text's, but is 0.1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"noise_share": 0.1, "diffusion": True}},
        "`masking.noise_share` must be left out with diffusion, which masks single tokens, a share of its own in each row, but is 0.1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"final_rate": 0.15}},
        "`masking.final_rate` must differ from rate, with which it begins, but is 0.15 instead.",
    ),
    (
        BERT
        | {"masking": MASKS | {"rate": 0.6, "count": "bernoulli"}, "data.sequence_length": 5}
        | {"data.validation": "held-out"},
        "`data.sequence_length` must leave a target in a held-out row, of which 15 % are masked, but is 5 instead; set at least 6.",
    ),
    *(
        (
            BERT
            | {"masking": MASKS | {"strategy": strategy}, "objective": {"bias": "corrected"}}
            | {"data.tokenizer": "tokenizer.json"},
            f"`objective.bias` must be another with masking.strategy: {strategy}, by which ids are targets more or less often than in the text, but is corrected instead; take paper or once.",
        )
        for strategy in ("whole_word", "pmi")
    ),
    *(
        (
            BERT
            | {"masking": MASKS | {"strategy": strategy}, "objective.replaced_tokens": {"generator_layers": 1}}
            | {"data.tokenizer": "tokenizer.json"},
            f"`objective.replaced_tokens.draws` must be `vocabulary` with masking.strategy: {strategy}, by which ids are targets more or less often than in the text, but is `group` instead.",
        )
        for strategy in ("whole_word", "frequency", "hardest")
    ),
    (
        BERT | {"masking": MASKS | {"rate_course": "cosine"}},
        "`masking.rate_course` must be left out without final_rate, but is cosine instead.",
    ),
    (
        BERT | {"masking": MASKS | {"strategy": "hardest", "adapt_every": 3}, "data.prefetch": 4},
        "`masking.adapt_every` must be at least data.prefetch (4), the steps that are masked ahead, but is 3 instead.",
    ),
    *(
        (
            BERT | {"masking": MASKS | {"diffusion": True, field: value}},
            f"`masking.{field}` must be left out with diffusion, which masks single tokens, a share of its own in each row, but is {value} instead.",
        )
        for field, value in {"rate": 0.4, "count": "bernoulli", "mask_share": 0.7, "random_share": 0.2}.items()
    ),
    (
        BERT | {"masking": MASKS | {"diffusion": True, "strategy": "hardest"}},
        "`masking.strategy` must be one of uniform, frequency, informative, weights with diffusion, but is hardest instead.",
    ),
    (
        BERT | {"masking": MASKS | {"diffusion": True, "masks_from_layer": 1}},
        "`masking.masks_from_layer` must be left out with diffusion, which masks single tokens, a share of its own in each row, but is 1 instead.",
    ),
    ({"masking": MASKS | {"diffusion": True}}, "`masking` must be left out of a decoder, but is given instead."),
    (
        BERT | {"masking": MASKS | {"masks_from_layer": 2}},
        "`masking.masks_from_layer` must be below model.num_layers (2), but is 2 instead.",
    ),
    (
        BERT
        | {
            "model.size": "modernbert-15m",
            "masking": MASKS | {"masks_from_layer": 1},
            "parallel": {"tensor": 2, "sequence": True},
        },
        "`masking.masks_from_layer` must be left out with parallel.sequence, which splits whole rows, but is 1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"masks_from_layer": 1, "mask_share": 0}},
        "`masking.masks_from_layer` must be left out with mask_share: 0, which has no mask tokens, but is 1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_decoder_layers": 1, "masks_from_layer": 1}},
        "`masking.masks_from_layer` must be left out with mask_decoder_layers, where mask tokens enter after the model's last layer, but is 1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_decoder_layers": 1, "dropping": {"from_layer": 0}}},
        "`masking.dropping` must be left out with mask_decoder_layers: there are no mask tokens to be kept before it, but is given instead.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_decoder_layers": 1}, "model.size": "modernbert-15m"},
        "`masking.mask_decoder_layers` must be left out of a modernbert, whose last norm would be the decoder's, but is 1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"special_tokens": [3, -1]}},
        "`masking.special_tokens` must name ids of at least 0, but is -1 instead.",
    ),
    (
        BERT | {"masking": MASKS, "model.size": "roberta-base"},
        "`masking.special_tokens` must include 1, the padding id of a roberta (model.position_offset - 1), but is [] instead; its tokens have no position, and the text must not contain it.",
    ),
    (
        BERT | {"masking": MASKS | {"special_tokens": [1]}, "model.size": "xlm-r-base"},
        "`model.position_offset` must follow a padding id that is no other special token, but is 2 (id 1) instead.",
    ),
    (
        BERT | {"masking": MASKS, "model.size": "xlm-r-base", "model.position_offset": 0},
        "`model.position_offset` must be the padding id + 1 in a xlm_roberta, but is 0 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_decoder_layers": 2, "mask_share": 0}},
        "`masking.mask_decoder_layers` must be left out with mask_share: 0, which has no mask tokens, but is 2 instead.",
    ),
    (
        BERT
        | {
            "model.size": "modernbert-15m",
            "masking": MASKS | {"mask_decoder_layers": 2},
            "parallel": {"tensor": 2, "sequence": True},
        },
        "`masking.mask_decoder_layers` must be left out with parallel.sequence, which splits whole rows, but is 2 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_decoder_layers": 2}, "init": {"from_hf": "x", "mode": "continue"}},
        "`init.from_hf` must be left out with masking.mask_decoder_layers, which such a folder lacks, but is x instead.",
    ),
    (
        BERT | {"masking": MASKS | {"mask_decoder_layers": 2}, "model.is_causal": True},
        "`masking.mask_decoder_layers` must be left out with model.is_causal: nothing is masked where next tokens are learned, but is 2 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"diffusion": True, "dropping": {"from_layer": 0}}},
        "`masking.dropping` must be left out with diffusion, which masks single tokens, a share of its own in each row, but is given instead.",
    ),
    (
        BERT | {"masking": MASKS | {"dropping": {"from_layer": 1}}},
        "`masking.dropping.from_layer` must be below to_layer (1), but is 1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"dropping": {"from_layer": 0, "to_layer": 2}}},
        "`masking.dropping.to_layer` must be at most 1, since the last layer computes all tokens, but is 2 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"masks_from_layer": 1, "dropping": {"from_layer": 0}}},
        "`masking.dropping.from_layer` must be at least masking.masks_from_layer (1), before which there are no mask tokens to be kept, but is 0 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"dropping": {"from_layer": 0, "keep_share": 0.1}}},
        "`masking.dropping.keep_share` must be at least the largest share of targets (0.15), since all may be mask tokens, which are kept, but is 0.1 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"rate": 0.2, "final_rate": 0.6, "dropping": {"from_layer": 0}}},
        "`masking.dropping.keep_share` must be at least the largest share of targets (0.6), since all may be mask tokens, which are kept, but is 0.5 instead.",
    ),
    (
        BERT
        | {
            "model.size": "modernbert-15m",
            "masking": MASKS | {"dropping": {"from_layer": 0}},
            "parallel": {"tensor": 2, "sequence": True},
        },
        "`masking.dropping` must be left out with parallel.sequence, which splits whole rows, but is given instead.",
    ),
    (
        BERT | {"masking": MASKS | {"dropping": {"from_layer": 0}, "adapt_every": 2}, "data.prefetch": 3},
        "`masking.adapt_every` must be at least data.prefetch (3), the steps that are masked ahead, but is 2 instead.",
    ),
    (
        BERT | {"masking": MASKS | {"dropping": {"from_layer": 0}}, "model.is_causal": True},
        "`masking.dropping` must be left out with model.is_causal: nothing is masked where next tokens are learned, but is given instead.",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), MISTAKES)
def test_what_cannot_be_masked_earns_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert_told(changes, sentence)
