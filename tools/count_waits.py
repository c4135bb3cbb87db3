"""Counts where a training step makes the host wait for the GPU: in megahead, DeepSpeed or the backward pass.

tools/count_waits.py --config configs/pythia-70m-headless.yaml [--set a.b=c] [--steps 5]

Trains a few steps as launch/pretrain.py does (one process, no evaluation, no output) with CUDA's synchronization
warnings on. A step needs its losses and its gradient norm on the host before it is applied, which are two waits of
megahead's; there is none between its micro-batches.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.command import build_parser, report
from megahead import wording
from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from megahead.errors import UserError, run_command

WARM_UP = 3
PACKAGE_NAMES = {"megahead": "megahead", "deepspeed": "DeepSpeed"}
BACKWARD = "backward pass"
# Settings with which a run does nothing between or after its steps
STEPS_ONLY = (
    *("schedule={name: constant}", "tasks=null", "data.validation=null", "training.max_seconds=null"),
    *("training.evaluate_every=1000000000", "training.checkpoint_every=1000000000", "training.log_seconds=1000000000"),
)
WaitSite = tuple[str, str]  # package, and line


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--config", required=True, help="a run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one setting")
    parser.add_argument("--steps", type=int, default=5, help="steps to count (default: 5)")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.set)
    import torch

    if not torch.cuda.is_available():
        raise UserError("the machine must have a CUDA device to count waits on, but has none.")
    waits = count_waits(config, arguments.steps)
    rows = [{"who": who, "a step": n / arguments.steps, "where": line} for (who, line), n in waits.most_common()]
    report(rows, output=arguments.output)
    for who in (*PACKAGE_NAMES.values(), BACKWARD):
        total = sum(n for (waiter, _), n in waits.items() if waiter == who)
        print(f"{who}: {wording.pluralize(total / arguments.steps, 'wait', 'g')} a step")


def count_waits(config: RunConfig, steps: int) -> Counter[WaitSite]:
    """Counts the waits of each line in `steps` steps of `config`, after a few warm-up steps."""
    import torch

    from benchmarks.rows import with_overrides
    from megahead.distributed.launch import Launch
    from megahead.train import loop, run, step

    waits: Counter[WaitSite] = Counter()
    steps_taken = 0

    def counted_train_step(*arguments: Any) -> Any:
        nonlocal steps_taken
        steps_taken += 1
        with record_waits(waits) if steps_taken > WARM_UP else torch.autograd.set_multithreading_enabled(False):
            return step.train_step(*arguments)

    with tempfile.TemporaryDirectory() as folder, patch.object(loop, "train_step", counted_train_step):
        config = with_overrides(config, f"output_dir={folder}", f"training.steps={WARM_UP + steps}", *STEPS_ONLY)
        run.pretrain(config, Launch())
    return waits


@contextmanager
def record_waits(waits: Counter[WaitSite]) -> Iterator[None]:
    """Adds every wait of this thread for a GPU to `waits`; backward passes run in this thread, too."""
    import torch

    def record(*_: Any, **__: Any) -> None:
        waits[find_wait_site(traceback.extract_stack()[:-1])] += 1

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **keywords: Any) -> Any:
            record()
            return function(*arguments, **keywords)

        return recorded

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        warnings.filterwarnings("always", ".*synchronizing CUDA operation")
        warnings.showwarning = lambda message, *_, **__: record() if "synchronizing CUDA" in str(message) else None
        for waiter in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            stack.enter_context(patch.object(waiter, "synchronize", recording(waiter.synchronize)))
        torch.cuda.set_sync_debug_mode("warn")
        stack.callback(lambda: torch.cuda.set_sync_debug_mode("default"))
        yield


def find_wait_site(stack: Sequence[traceback.FrameSummary]) -> WaitSite:
    """The innermost frame of megahead or DeepSpeed, or the backward pass if that started the wait."""
    for frame in reversed(stack):
        parts = Path(frame.filename).parts
        if parts[-3:] == ("torch", "autograd", "graph.py"):
            return BACKWARD, f"{frame.name}"
        for package, name in PACKAGE_NAMES.items():
            if package in parts[:-1]:
                path = parts[len(parts) - 1 - parts[::-1].index(package) :]
                return name, f"{'/'.join(path)}:{frame.lineno} in {frame.name}"
    return "other", f"{stack[-1].filename}:{stack[-1].lineno}"


if __name__ == "__main__":
    run_command(main)
