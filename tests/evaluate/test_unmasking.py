"""Text by an encoder: what is filled in, where, by which chances, and in how many passes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megahead.errors import CheckpointError, FieldError
from megahead.evaluate.language_models import generate_by_unmasking, sampling_options

CLS, SEP, MASK, A, B, C = range(6)
NAMES = ["[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
PLAIN = sampling_options(1.0, 0, 1.0)


class Letters:
    """A tokenizer of letters."""

    name_or_path = "FOLDER"
    cls_token_id, sep_token_id, mask_token_id, all_special_ids = CLS, SEP, MASK, [CLS, SEP, MASK]

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        assert not verbose
        return {"input_ids": [NAMES.index(letter) for letter in text]}

    def decode(self, ids: Any) -> str:
        return "".join(NAMES[int(id_)] for id_ in ids)


class Conditional:
    """A model of a joint distribution over the letters behind the first `given` places of a row."""

    device = torch.device("cpu")

    def __init__(self, joint: np.ndarray, given: int, context: int = 16) -> None:
        self.joint, self.given, self.read = joint, given, []
        self.config = type("Config", (), {"max_position_embeddings": context})

    def __call__(self, input_ids: Tensor) -> Any:
        row = input_ids[0].tolist()
        self.read.append(row)
        letters = row[self.given : -1]
        index = tuple(slice(None) if id_ == MASK else id_ - A for id_ in letters)
        there = np.zeros_like(self.joint)
        there[index] = self.joint[index]
        logits = torch.full((len(row), 6), 9.0)  # special tokens would be likely
        for place in range(len(letters)):
            others = tuple(k for k in range(len(letters)) if k != place)
            with np.errstate(divide="ignore"):
                logits[self.given + place, A:] = torch.from_numpy(np.log(there.sum(others) / there.sum()))
        return type("Output", (), {"logits": logits[None]})


def joint(places: int = 2) -> np.ndarray:
    return np.random.default_rng(0).dirichlet(np.ones(3**places)).reshape((3,) * places)


def test_one_token_a_pass_writes_texts_as_often_as_the_model_finds_them() -> None:
    torch.manual_seed(0)
    model, draws = Conditional(joint(), given=2), 4000
    texts = [generate_by_unmasking(model, Letters(), "a", 2, PLAIN) for _ in range(draws)]
    found = np.array([texts.count(one + other) / draws for one, other in product("abc", repeat=2)]).reshape(3, 3)
    assert found == pytest.approx(joint(), abs=0.03)
    assert np.abs(found - np.outer(joint().sum(1), joint().sum(0))).max() > 0.05  # which tokens drawn apart would give


@pytest.mark.parametrize(
    ("passes", "masked"), [(1, [4]), (2, [4, 2]), (3, [4, 2, 1]), (4, [4, 3, 2, 1]), (None, [4, 3, 2, 1])]
)
def test_each_pass_fills_its_share_of_the_places_that_are_left(passes: int | None, masked: list[int]) -> None:
    model = Conditional(joint(4), given=3)
    text = generate_by_unmasking(model, Letters(), "ab", 4, PLAIN, passes)
    assert len(text) == 4
    assert not set(text) - set("abc")
    assert [row.count(MASK) for row in model.read] == masked
    assert {(*row[:3], row[-1]) for row in model.read} == {(CLS, A, B, SEP)}


def test_places_are_filled_in_any_order() -> None:
    torch.manual_seed(0)
    model = Conditional(joint(3), given=1)
    for _ in range(60):
        generate_by_unmasking(model, Letters(), "", 3, PLAIN)
    assert {row.index(MASK) for row in model.read if row.count(MASK) == 1} == {1, 2, 3}


@pytest.mark.parametrize(
    "sampling", [sampling_options(0, 0, 1.0), sampling_options(1.0, 1, 1.0), sampling_options(1.0, 0, 1e-6)]
)
def test_the_likeliest_token_alone_is_drawn_where_that_is_asked(sampling: dict[str, Any]) -> None:
    torch.manual_seed(0)
    likely = np.full((3, 3), 0.01)
    likely[1, 2] = 0.92
    model = Conditional(likely, given=1)
    assert {generate_by_unmasking(model, Letters(), "", 2, sampling) for _ in range(20)} == {"bc"}


def test_a_long_prompt_is_cut_at_its_beginning() -> None:
    model = Conditional(joint(), given=4, context=7)
    generate_by_unmasking(model, Letters(), "aaacab", 2, PLAIN)
    assert model.read[0] == [CLS, C, A, B, MASK, MASK, SEP]


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    letters = Letters()
    letters.mask_token_id = None  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"`FOLDER` must hold a tokenizer with \[CLS\], \[SEP\] and \[MASK\]"):
        generate_by_unmasking(Conditional(joint(), 1), letters, "a", 2, PLAIN)


@pytest.mark.parametrize(
    ("tokens", "passes", "sentence"),
    [
        (6, None, r"`--max-new-tokens` must leave 2 of the model's context \(7\), but is 6"),
        (2, 3, r"`--passes` must be 1 to --max-new-tokens \(2\), but is 3"),
        (2, 0, r"`--passes` must be 1 to --max-new-tokens \(2\), but is 0"),
    ],
)
def test_what_cannot_be_written_is_refused(tokens: int, passes: int | None, sentence: str) -> None:
    with pytest.raises(FieldError, match=sentence):
        generate_by_unmasking(Conditional(joint(), 1, context=7), Letters(), "", tokens, PLAIN, passes)
