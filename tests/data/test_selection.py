"""Texts under nested keys, and records that are wanted or not."""

from __future__ import annotations

import pytest

from megahead.data.records import InvalidRecord, Selection, parse_conditions
from megahead.errors import FieldError

PILE = {"text": "words", "meta": {"pile_set_name": "ArXiv", "year": 2020}, "spam": True, "lang": None}


def test_nested_and_literal_keys() -> None:
    assert Selection("meta.pile_set_name").text(PILE) == "ArXiv"
    assert Selection("a.b").text({"a.b": "literal", "a": {"b": "nested"}}) == "literal"
    assert Selection("a.b.c").text({"a": {"b.c": "both"}}) == "both"
    for record in ({"a": "x"}, {"a": {"c": "x"}}, {}, [1], None, {"a": None}):
        with pytest.raises(InvalidRecord, match=r"key `a\.b`"):
            Selection("a.b").text(record)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"text": "one", "body": "two"}, "one"),
        ({"text": "", "body": "two"}, "two"),
        ({"text": None, "body": "two"}, "two"),
        ({"text": 3, "body": {"text": "two"}, "body.text": " \n", "b": "no"}, "has int"),
        ({"text": "", "body": None}, ""),
        ({"body": None}, "`body`, but has NoneType"),
        ({"b": "no"}, "the key `text` or `body` or `body.text`, but has not"),
    ],
)
def test_of_several_keys_the_first_that_is_not_blank_counts(record: dict[str, object], text: str) -> None:
    selection = Selection(("text", "body", "body.text"))
    if "has" in text:
        with pytest.raises(InvalidRecord, match=text):
            selection.text(record)
    else:
        assert selection.text(record) == text


@pytest.mark.parametrize(
    ("keep", "drop", "wanted"),
    [
        ([], [], True),
        (["meta.pile_set_name=ArXiv"], [], True),
        (["meta.pile_set_name=Books3", "meta.pile_set_name=ArXiv"], [], True),
        (["meta.pile_set_name=Books3"], [], False),
        (["meta.pile_set_name=ArXiv", "meta.year=2021"], [], False),
        (["meta.year=2020"], [], True),
        (["lang=en"], [], False),
        ([], ["meta.pile_set_name=ArXiv"], False),
        ([], ["meta.pile_set_name=Books3", "lang=en"], True),
        (["meta.year=2020"], ["meta.pile_set_name=ArXiv"], False),
        ([], ["spam=true"], False),  # as JSON spells it
        ([], ["spam=True"], False),
        ([], ["spam=false"], True),
        (["lang=null", "spam=true"], [], True),
    ],
)
def test_filters(keep: list[str], drop: list[str], wanted: bool) -> None:
    text = Selection("text", parse_conditions("--keep", keep), parse_conditions("--drop", drop)).text(PILE)
    assert text == ("words" if wanted else None)


def test_values_may_hold_spaces_and_signs() -> None:
    assert parse_conditions("--keep", ["a=Wikipedia (en)", "b=x=y"]) == (("a", "Wikipedia (en)"), ("b", "x=y"))
    with pytest.raises(FieldError, match="`--keep` must be KEY=VALUE"):
        parse_conditions("--keep", ["ArXiv"])
