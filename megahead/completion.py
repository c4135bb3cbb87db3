"""Shell completion with argcomplete: after `eval "$(register-python-argcomplete megahead)"` the shell runs `megahead`
with its command line in COMP_LINE.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any


def complete(commands: Iterable[str]) -> int:
    """Prints the names of the commands, or the options of the one in COMP_LINE, and exits. Returns 1 if nothing fits:
    the shell then completes file names."""
    try:
        from argcomplete.lexers import split_line
    except ImportError:
        return 1
    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    names = {name.replace("_", "-"): name for name in commands}
    patch_argparse()
    if len(words) < 2:
        parser = argparse.ArgumentParser()
        parser.add_argument("command", choices=names)
        parser.add_argument("--version", action="store_true")
        parser.parse_args()
    name = words[1].replace("_", "-")
    if name in names:
        os.environ["_ARGCOMPLETE"] = "2"  # the command's arguments follow the second word
        import_module(f"megahead.commands.{names[name]}").main()
    return 1


def patch_argparse() -> None:
    """Makes `parse_args` complete the command line and exit. Values stay strings, so that nothing is fetched."""
    import argcomplete

    def parse_args(parser: argparse.ArgumentParser) -> Any:
        argcomplete.autocomplete(parser)

    def get_value(_: argparse.ArgumentParser, action: argparse.Action, arg_string: str) -> str:
        return arg_string

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[assignment, method-assign]
    argparse.ArgumentParser._get_value = get_value  # type: ignore[assignment, method-assign]
