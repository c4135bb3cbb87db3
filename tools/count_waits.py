"""Counts where a training step makes the host wait for the GPU, and who asks for it: we, DeepSpeed, the backward pass.

tools/count_waits.py --config configs/pythia-70m-headless.yaml [--set a.b=c] [--steps 5]

Trains a few steps as launch/pretrain.py does (one process, no evaluation, nothing kept) with CUDA's synchronisation
warnings on. A step has to be told its losses and its gradient norm before it is applied, which are two waits of ours;
there is none between its micro-batches.
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

from benchmarks.command import parser_of, report
from megahead import wording
from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from megahead.errors import UserError, run_command

WARM_UP = 3
OWNERS = {"megahead": "megahead", "deepspeed": "DeepSpeed"}
BACKWARD = "backward pass"
# Settings without which a run does something between or after its steps
NOTHING_ELSE = (
    *("schedule={name: constant}", "tasks=null", "data.validation=null", "training.max_seconds=null"),
    *("training.evaluate_every=1000000000", "training.checkpoint_every=1000000000", "training.log_seconds=1000000000"),
)
Place = tuple[str, str]  # who waits, and the line


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--config", required=True, help="a run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one setting")
    parser.add_argument("--steps", type=int, default=5, help="steps to count (default: 5)")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.set)
    import torch

    if not torch.cuda.is_available():
        raise UserError("the machine must have a CUDA device to count waits on, but has none.")
    waits = counted(config, arguments.steps)
    rows = [{"who": who, "a step": n / arguments.steps, "where": line} for (who, line), n in waits.most_common()]
    report(rows, output=arguments.output)
    for who in (*OWNERS.values(), BACKWARD):
        total = sum(n for (owner, _), n in waits.items() if owner == who)
        print(f"{who}: {wording.pluralize(total / arguments.steps, 'wait', 'g')} a step")


def counted(config: RunConfig, steps: int) -> Counter[Place]:
    """How often each place waited in `steps` steps of `config`, after a few that are not counted."""
    import torch

    from benchmarks.rows import changed
    from megahead.distributed.launch import Launch
    from megahead.train import loop, run, step

    waits: Counter[Place] = Counter()
    taken = 0

    def watched(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        with noted(waits) if taken > WARM_UP else torch.autograd.set_multithreading_enabled(False):
            return step.train_step(*arguments)

    with tempfile.TemporaryDirectory() as folder, patch.object(loop, "train_step", watched):
        alone = changed(config, f"output_dir={folder}", f"training.steps={WARM_UP + steps}", *NOTHING_ELSE)
        run.pretrain(alone, Launch())
    return waits


@contextmanager
def noted(waits: Counter[Place]) -> Iterator[None]:
    """Inside, every wait of this thread for a GPU is added to `waits`; backward passes run in this thread, too."""
    import torch

    def note(*_: Any, **__: Any) -> None:
        waits[place(traceback.extract_stack()[:-1])] += 1

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **named: Any) -> Any:
            note()
            return function(*arguments, **named)

        return wait

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        warnings.filterwarnings("always", ".*synchronizing CUDA operation")
        warnings.showwarning = lambda message, *_, **__: note() if "synchronizing CUDA" in str(message) else None
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            stack.enter_context(patch.object(owner, "synchronize", noting(owner.synchronize)))
        torch.cuda.set_sync_debug_mode("warn")
        stack.callback(lambda: torch.cuda.set_sync_debug_mode("default"))
        yield


def place(stack: Sequence[traceback.FrameSummary]) -> Place:
    """The innermost frame of a package that can be asked about it; C++ of a backward pass is nobody's."""
    for frame in reversed(stack):
        parts = Path(frame.filename).parts
        if parts[-3:] == ("torch", "autograd", "graph.py"):
            return BACKWARD, f"{frame.name}"
        for package, owner in OWNERS.items():
            if package in parts[:-1]:
                inside = parts[len(parts) - 1 - parts[::-1].index(package) :]
                return owner, f"{'/'.join(inside)}:{frame.lineno} in {frame.name}"
    return "other", f"{stack[-1].filename}:{stack[-1].lineno}"


if __name__ == "__main__":
    run_command(main)
