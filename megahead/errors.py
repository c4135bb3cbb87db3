"""Errors a user can repair, each one sentence: "`field` must RULE, but is VALUE instead; FIX." (or "needs", "cannot").

Anything raised from here ends a command with exit code 2 and its sentence, without a traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megahead.wording import counted


class UserError(Exception):
    """A mistake in what the user gave (settings, files, checkpoints), in one sentence."""


class FieldError(UserError):
    """A value that breaks a rule: `` `field` must RULE, but is VALUE instead; FIX.``"""

    def __init__(self, field: str, rule: str, *, got: Any, hint: str = "") -> None:
        self.field, self.rule, self.got, self.hint = field, rule, got, hint
        fix = f"; {hint}" if hint else ""
        instead = "" if got == "missing" else " instead"
        super().__init__(f"`{field}` must {rule}, but is {got}{instead}{fix}{'' if fix.endswith('?') else '.'}")


class ConfigError(FieldError, ValueError):
    """A setting of a run that breaks a rule (a ValueError too, so that pydantic gathers it with the others)."""


class ArgumentError(FieldError, ValueError):
    """An argument of a public function that does not fit the others."""


class ConfigErrors(UserError):
    """Every mistake of one config, a line each."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n  ".join([f"{source} has {counted(len(problems), 'mistake')}:", *problems]))


class DataError(UserError):
    """A dataset, tokenizer or text file that cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or made by another run."""


def message_of(error: Exception) -> str:
    """What is printed of it; of one that no user can repair also its type."""
    return str(error) if isinstance(error, UserError | OSError) else repr(error)


def existing(text: str) -> Path:
    """argparse's `type` for a path that must exist; UserError before anything is imported to open it."""
    path = Path(text)
    if not path.exists():
        raise UserError(f"`{path}` must exist, but does not; check the path.")
    return path


def at_least(least: float, **options: float | None) -> None:
    """FieldError for the first of a command's options that is below `least`; None was not given."""
    for name, value in options.items():
        if value is not None and value < least:
            raise FieldError(f"--{name.replace('_', '-')}", f"be at least {least}", got=value)


def print_error(message: str) -> None:
    """Prints what went wrong to stderr."""
    print(f"error: {message}", file=sys.stderr, flush=True)


def run_command(
    main: Callable[[], int | None], *, at_once: bool = False, report: Callable[[str], None] = print_error
) -> None:
    """Runs a command's `main` and exits with its code (0 for None), or with 2 after a UserError or OSError.

    `at_once`: after an error the process ends without waiting for its threads, which may wait for other processes.
    `report` prints the error's sentence, or leaves that to another process.
    """
    try:
        sys.exit(main() or 0)
    except (UserError, OSError) as error:
        report(str(error))
        exit_immediately(2) if at_once else sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    except Exception:
        if at_once:
            traceback.print_exc()
            exit_immediately(1)
        raise


def exit_immediately(code: int) -> None:
    """Without waiting for threads, and without what Python does at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
