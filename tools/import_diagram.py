"""Draws docs/architecture.md's diagram from the imports of the code.

python tools/import_diagram.py

An arrow from a package to another that it imports; what follows from other arrows is left out.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- drawn by tools/import_diagram.py -->\n", "<!-- end of the drawing -->\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(redrawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")


def redrawn(page: str) -> str:
    """`page` with the diagram that belongs between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + diagram(reduced(imports())) + END + rest.partition(END)[2]


def imports() -> dict[str, set[str]]:
    """Each package of megahead (or module at its top) and those it imports, when imported or later."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "megahead").rglob("*.py")):
        inside = path.relative_to(ROOT / "megahead").parts
        name = inside[0].removesuffix(".py")
        if name == "__init__":
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        used = {part for node in nodes if isinstance(node, ast.ImportFrom) for part in parts(node)}
        found.setdefault(name, set()).update(used - {name})
    return found


def parts(line: ast.ImportFrom) -> list[str]:
    """What of megahead a line imports from: `from megahead.nn.block import Block`, `from megahead import train`."""
    top, _, inside = (line.module or "").partition(".")
    if top != "megahead":
        return []
    return [inside.split(".")[0]] if inside else [alias.name for alias in line.names]


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without arrows that a longer way replaces."""

    def reach(name: str) -> set[str]:
        return {name}.union(*(reach(below) for below in graph[name]))

    return {
        name: {below for below in used if not any(below in reach(other) for other in used - {below})}
        for name, used in graph.items()
    }


def diagram(graph: dict[str, set[str]]) -> str:
    lines = [f"    {name} --> {below}" for name in sorted(graph) for below in sorted(graph[name])]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```", ""])


if __name__ == "__main__":
    main()
