"""The `megahead` command, also `python -m megahead`: lists the commands of megahead/commands, or runs one of them.

Imports only the command that is called: the list, the version and an error for an unknown name come at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from megahead.commands import COMMANDS
from megahead.errors import UserError, run_command
from megahead.version import __version__
from megahead.wording import nearest


def main() -> None:
    run_command(answer)


def answer() -> int | None:
    """Does what the command line asks for, and returns its exit code."""
    word, *options = sys.argv[1:] or [""]
    code: int | None
    if "_ARGCOMPLETE" in os.environ and not word:
        code = import_module("megahead.completion").complete(names())
        return code
    if word in ("", "-h", "--help"):
        print(usage())
        return 0 if word else 2
    if word == "--version":
        print(f"megahead {__version__}")
        return 0
    name = known(word)
    sys.argv = [f"megahead {dashed(name)}", *options]  # argparse names the command by the first of them
    code = import_module(f"megahead.commands.{name}").main()
    return code


def script(module: str, command: str) -> None:
    """`megahead COMMAND` in a checkout: runs it where `module` is the script that was started."""
    if module == "__main__":
        run_command(import_module(f"megahead.commands.{command}").main)


def usage() -> str:
    """Every command with its sentence, group by group."""
    width = max(len(name) for commands in COMMANDS.values() for name in commands) + 2
    groups = [
        "\n".join([group, *(f"  {dashed(name):<{width}}{sentence}" for name, sentence in commands.items())])
        for group, commands in COMMANDS.items()
    ]
    head = "usage: megahead COMMAND [options], megahead COMMAND --help, megahead --version"
    return "\n\n".join([head, *groups])


def known(word: str) -> str:
    """The module of the command that `word` names, with dashes or underscores. UserError when there is none."""
    name = word.replace("-", "_")
    if name in names():
        return name
    fix = nearest(dashed(word), map(dashed, names())) or "`megahead --help` lists them."
    raise UserError(f"`megahead` must be given the name of a command, but `{word}` is none; {fix}")


def names() -> list[str]:
    return [name for commands in COMMANDS.values() for name in commands]


def dashed(name: str) -> str:
    """As it is typed."""
    return name.replace("_", "-")


if __name__ == "__main__":
    main()
