"""Shows how many sequences a model has read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn


@contextmanager
def forward_progress(model: Any, name: str) -> Iterator[None]:
    """Inside, a line on stderr counts the sequences of every call of `model`, if stderr is a terminal."""
    columns = TextColumn("{task.description}", markup=False), TextColumn("sequence {task.completed}")
    progress = Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())
    bar = progress.add_task(name, total=None)

    def count(_: Any, inputs: tuple[Any, ...], named: dict[str, Any], __: Any) -> None:
        progress.advance(bar, len(inputs[0] if inputs else named["input_ids"]))

    hook = model.register_forward_hook(count, with_kwargs=True)
    try:
        with progress:
            yield
    finally:
        hook.remove()
