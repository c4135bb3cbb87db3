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
