"""Turns one Python source file into pages of documentation, the way a reference manual would print them.

A module or class opens a page with its own docstring; its members follow, each under a line such as `name(arguments)`.
A member with enough to say gets a page of its own instead. Nothing is imported: the text comes from `ast`.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OWN_PAGE = 1000  # characters: a member documented at this length leaves its parent's page
SHORTEST_PAGE = 400  # characters: below this a page says too little
LETTERS = 0.72  # least share of letters and spaces; below it, pages are tables, formulas and dumps of numbers

_TRIPLE_QUOTED = re.compile(rb'("""|\'\'\')(.*?)\1', re.DOTALL)
_ADDS_DOCSTRING = re.compile(r"add_?(new)?_?doc")
_OTHER_THAN_LETTERS = bytes(code for code in range(128) if not chr(code).isalpha() and code != ord(" "))
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Member = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Page:
    """One document: `title`, also its first line, is the qualified name of what `text` describes."""

    module: str
    title: str
    text: str


def pages_of(path: Path, module: str) -> list[Page]:
    """The pages of one source file, in source order; none for a file that does not parse or says too little.

    Files are first weighed by their triple quotes, which costs a hundredth of parsing them.
    """
    source = path.read_bytes()
    if sum(len(match[1]) for match in _TRIPLE_QUOTED.findall(source)) < SHORTEST_PAGE:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found: dict[str, str] = {}
    own = _describe(tree, module, found)
    pages = [page(module, name, text) for name, text in [(module, own), *found.items(), *_attached(tree, module)]]
    return [page for page in pages if reads_well(page.text)]


def page(module: str, name: str, text: str) -> Page:
    """A page with its title line on top, without trailing spaces, runs of empty lines or broken characters."""
    title = name.replace(".__init__", "")
    lines = (line.rstrip() for line in f"{title}\n\n{text}".splitlines())
    clean = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
    return Page(module, title, clean.encode("utf-8", "replace").decode())


def reads_well(text: str) -> bool:
    """Whether a page is long enough, and words more than symbols."""
    squeezed = " ".join(text.split()).encode()
    letters = len(squeezed.translate(None, delete=_OTHER_THAN_LETTERS))
    return len(squeezed) >= SHORTEST_PAGE and letters >= LETTERS * len(squeezed)


def _describe(node: ast.Module | _Member, name: str, found: dict[str, str]) -> str:
    """What `node` and its smaller members say; larger members go to `found`, by qualified name."""
    parts = [ast.get_docstring(node) or ""]
    members = [] if isinstance(node, _Function) else [child for child in node.body if isinstance(child, _Member)]
    for child in members:
        text = _describe(child, f"{name}.{child.name}", found)
        if len(text) >= OWN_PAGE:
            found[f"{name}.{child.name}"] = text
        elif text:
            parts.append(f"{_signature(child)}\n{_indent(text)}")
    return "\n\n".join(part for part in parts if part)


def _signature(node: _Member) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
    return f"{node.name}({', '.join(names)})"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


def _attached(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Name and text of docstrings given to compiled objects, as in `add_docstr(torch.abs, "...")`."""
    for statement in tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or not _ADDS_DOCSTRING.search(ast.unparse(call.func)):
            continue
        strings = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and type(node.value) is str]
        targets = [ast.unparse(argument).strip("'") for argument in call.args]
        names = [target for target in targets if re.fullmatch(r"[\w.]{1,80}", target)]
        if names and strings:
            name = names[-1] if "." in names[-1] else f"{module}.{names[-1]}"
            yield name, inspect.cleandoc(max(strings, key=len))
