"""The diagram of docs/architecture.md is that of the code's imports, and leaves out only what follows."""

from __future__ import annotations

import import_diagram


def test_the_committed_diagram_is_what_the_tool_draws() -> None:
    page = import_diagram.PAGE.read_text()
    assert import_diagram.redrawn(page) == page, "imports have changed: run `python tools/import_diagram.py`"
    assert "    train --> engine\n" in page
    assert "    commands --> train\n" in page  # `from megahead import train`


def test_arrows_that_follow_from_others_are_left_out() -> None:
    graph = {"top": {"middle", "bottom", "other"}, "middle": {"bottom"}, "other": set(), "bottom": set()}
    assert import_diagram.reduced(graph)["top"] == {"middle", "other"}
