"""Errors a user can repair, each one sentence: "`field` must RULE, but is VALUE instead; FIX." (or "needs", "cannot").

A command that raises one prints its sentence, without a traceback, and exits with code 2.
"""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from megahead.wording import pluralize, print_line

SLOW_PACKAGES = ("torch", "transformers", "deepspeed", "lm_eval", "datasets", "matplotlib", "scipy", "sklearn")
"""Packages whose import takes from half a second to several, on a busy machine a minute."""


class UserError(Exception):
    """A mistake in the user's settings, files or checkpoints, in one sentence."""


class FieldError(UserError):
    """A value that breaks a rule: `` `field` must RULE, but is VALUE instead; FIX.``"""

    def __init__(self, field: str, rule: str, *, got: Any, hint: str = "") -> None:
        self.field, self.rule, self.got, self.hint = field, rule, got, hint
        fix = f"; {hint}" if hint else ""
        instead = "" if got == "missing" else " instead"
        super().__init__(f"`{field}` must {rule}, but is {got}{instead}{fix}{'' if fix.endswith('?') else '.'}")


class ConfigError(FieldError, ValueError):
    """A setting of a run that breaks a rule (a ValueError too, so that pydantic collects it)."""


class ArgumentError(FieldError, ValueError):
    """An invalid argument of a public function."""


class ConfigErrors(UserError):
    """All mistakes of one config, a line each."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n  ".join([f"{source} has {pluralize(len(problems), 'mistake')}:", *problems]))


class DataError(UserError):
    """A dataset, tokenizer or text file that cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or made by another run."""


def message_of(error: Exception) -> str:
    """The text of an error; for one that is no UserError or OSError also its type."""
    return str(error) if isinstance(error, UserError | OSError) else repr(error)


def existing_path(text: str) -> Path:
    """argparse's `type` for a path that must exist; UserError otherwise."""
    path = Path(text)
    if not text or not path.exists():  # an empty one, as of an unset variable, would be the working directory
        raise UserError(f"`{text}` must exist, but does not; check the path.")
    return path


def require_at_least(minimum: float, **options: float | None) -> None:
    """FieldError for the first of a command's options that is below `minimum` or NaN; None: not set."""
    for name, value in options.items():
        if value is not None and not value >= minimum:
            raise FieldError(f"--{name.replace('_', '-')}", f"be at least {minimum}", got=value)


def print_error(message: str) -> None:
    """Prints an error to stderr."""
    print_line(f"error: {message}", sys.stderr)


_CLOSED_PIPE_CODE = 141
"""A shell's code for a program that ended since the reader of its output had gone (128 + SIGPIPE)."""


def _output_is_closed() -> bool:
    """Whether the standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def run_command(
    main: Callable[[], int | None], *, immediate_exit: bool = False, report: Callable[[str], None] = print_error
) -> None:
    """Runs a command's `main` and exits with its code (0 for None), or with 2 after a UserError or OSError.

    Reports the first slow import, so that no command is silent for long. `immediate_exit`: exit after an error or
    Ctrl-C without joining threads, which may wait for other processes. `report` prints the error, on some ranks only.
    Without `immediate_exit` a command whose output's reader has gone ends in silence.
    """
    try:
        with slow_imports_reported():
            sys.exit(main() or 0)
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError) and not immediate_exit and _output_is_closed():
            exit_immediately(_CLOSED_PIPE_CODE)  # `head` has read enough
        report(str(error))
        exit_immediately(2) if immediate_exit else sys.exit(2)
    except KeyboardInterrupt:
        print_line("interrupted", sys.stderr)
        exit_immediately(130) if immediate_exit else sys.exit(130)
    except Exception:
        if immediate_exit:
            print_line(traceback.format_exc(), sys.stderr)
            exit_immediately(1)
        raise


@contextmanager
def slow_imports_reported() -> Iterator[None]:
    """In the block, writes `loading NAME` to stderr before the first import of a slow package, on rank 0 only."""
    finder = _SlowImportReporter()
    is_nested = any(isinstance(other, _SlowImportReporter) for other in sys.meta_path)
    if not is_nested and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _SlowImportReporter(MetaPathFinder):
    """Reports slow imports, finds no module: the import system asks it first."""

    def __init__(self) -> None:
        self._has_reported = False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in SLOW_PACKAGES and not self._has_reported:
            self._has_reported = True
            print_line(f"loading {fullname}", sys.stderr)


def exit_immediately(code: int) -> None:
    """Exits without joining threads or running atexit handlers."""
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk, a reader that has gone
            output.flush()
    os._exit(code)
