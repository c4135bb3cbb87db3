"""docs/configuration.md is what the schema says today."""

from __future__ import annotations

import configuration_page


def test_the_committed_page_is_what_the_tool_makes() -> None:
    assert configuration_page.PAGE.read_text() == configuration_page.render(), (
        "the schema has changed: run `python tools/configuration_page.py` and commit docs/configuration.md"
    )
