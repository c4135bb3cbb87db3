"""The `megahead` command, also `python -m megahead`: lists the commands of megahead/commands, or runs one of them.

Imports only the called command, so that the list, the version and errors in a command's name are fast.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from megahead import __version__
from megahead.commands import COMMANDS
from megahead.errors import UserError, run_command
from megahead.wording import did_you_mean


def main() -> None:
    run_command(dispatch)


def dispatch() -> int | None:
    """Runs the command that sys.argv names, and returns its exit code."""
    command, *options = sys.argv[1:] or [""]
    if "_ARGCOMPLETE" in os.environ and not command:
        return complete()
    if command in ("", "-h", "--help"):
        print(usage())
        return 0 if command else 2
    if command == "--version":
        print(f"megahead {__version__}")
        return 0
    name = resolve_command(command)
    sys.argv = [f"megahead {with_dashes(name)}", *options]  # argparse takes the command's name from the first one
    code: int | None = import_module(f"megahead.commands.{name}").main()
    return code


def run_script(script_name: str, command: str) -> None:
    """Runs a command if `script_name`, the `__name__` of a script in tools/, is `__main__`."""
    if script_name == "__main__":
        run_command(import_module(f"megahead.commands.{command}").main)


def usage() -> str:
    """All commands with their descriptions, by group."""
    width = max(len(name) for commands in COMMANDS.values() for name in commands) + 2
    groups = [
        "\n".join([group, *(f"  {with_dashes(name):<{width}}{description}" for name, description in commands.items())])
        for group, commands in COMMANDS.items()
    ]
    head = "usage: megahead COMMAND [options], megahead COMMAND --help, megahead --version"
    return "\n\n".join([head, *groups])


def resolve_command(command: str) -> str:
    """The module of a command, given with dashes or underscores; UserError if it does not exist."""
    name = command.replace("-", "_")
    if name in command_names():
        return name
    fix = did_you_mean(with_dashes(command), map(with_dashes, command_names())) or "`megahead --help` lists them."
    raise UserError(f"`megahead` must be given the name of a command, but `{command}` is none; {fix}")


def command_names() -> list[str]:
    return [name for commands in COMMANDS.values() for name in commands]


def with_dashes(name: str) -> str:
    return name.replace("_", "-")


# Shell completion by argcomplete: after `eval "$(register-python-argcomplete megahead)"` the shell runs `megahead` with
# its command line in COMP_LINE.


def complete() -> int:
    """Prints the names of the commands, or the options of the one in COMP_LINE, and exits. Returns 1 if nothing fits:
    the shell then completes file names."""
    try:
        from argcomplete.lexers import split_line
    except ImportError:
        return 1
    import argparse

    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    names = {with_dashes(name): name for name in command_names()}
    patch_argparse()
    if len(words) < 2:
        parser = argparse.ArgumentParser()
        parser.add_argument("command", choices=names)
        parser.add_argument("--version", action="store_true")
        parser.parse_args()
    name = with_dashes(words[1])
    if name in names:
        os.environ["_ARGCOMPLETE"] = "2"  # the command's arguments follow the second word
        import_module(f"megahead.commands.{names[name]}").main()
    return 1


def patch_argparse() -> None:
    """Makes `parse_args` complete the command line and exit. Argument types are not applied: no downloads."""
    from argparse import Action, ArgumentParser

    import argcomplete

    def parse_args(parser: ArgumentParser) -> Any:
        argcomplete.autocomplete(parser)

    def get_value(_: ArgumentParser, action: Action, arg_string: str) -> str:
        return arg_string

    ArgumentParser.parse_args = parse_args  # type: ignore[assignment, method-assign]
    ArgumentParser._get_value = get_value  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    main()
