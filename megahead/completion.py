"""Completion by Tab, where argcomplete is installed: `eval "$(register-python-argcomplete megahead)"` in a shell, which
then calls `megahead` with what stands on the line in its environment.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any


def complete(commands: Iterable[str]) -> int:
    """Answers the shell with names of commands, or with the options of the one that is named, and ends the process. 1
    where there is no answer: the shell then completes files."""
    try:
        from argcomplete.lexers import split_line
    except ImportError:
        return 1
    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    names = {name.replace("_", "-"): name for name in commands}
    answer_instead_of_parsing()
    if len(words) < 2:
        parser = argparse.ArgumentParser()
        parser.add_argument("command", choices=names)
        parser.add_argument("--version", action="store_true")
        parser.parse_args()
    name = words[1].replace("_", "-")
    if name in names:
        os.environ["_ARGCOMPLETE"] = "2"  # the command's own arguments begin behind the second word
        import_module(f"megahead.commands.{names[name]}").main()
    return 1


def answer_instead_of_parsing() -> None:
    """A command answers the shell where it would parse its arguments. What was typed stays text: no path is looked for,
    no checkpoint is fetched."""
    import argcomplete

    def answer(parser: argparse.ArgumentParser) -> Any:
        argcomplete.autocomplete(parser)

    def as_typed(_: argparse.ArgumentParser, action: argparse.Action, arg_string: str) -> str:
        return arg_string

    argparse.ArgumentParser.parse_args = answer  # type: ignore[assignment, method-assign]
    argparse.ArgumentParser._get_value = as_typed  # type: ignore[assignment, method-assign]
