"""Profiles steps of a run: prints the slowest operations and writes a trace; or counts the host's waits for the GPU.

python tools/profile_step.py --config configs/demo-headless.yaml [--set a.b=c] [--steps 5] [--output trace.json.gz]
python tools/profile_step.py --config configs/pythia-70m-headless.yaml --waits [--output waits.json]

Trains a few steps as launch/pretrain.py does (one process, no evaluation, no output); the first ones are warm-up and
not recorded. Open the trace at https://ui.perfetto.dev or chrome://tracing (both work locally, nothing is sent).

--waits names each line of megahead, DeepSpeed or the backward pass that makes the host wait, by CUDA's synchronization
warnings. Before a step is applied, the host needs its losses and its gradient norm: two waits of megahead; there is
none between micro-batches.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.command import build_parser, report
from megahead.config.loading import load_config
from megahead.config.run import RunConfig
from megahead.errors import UserError, run_command
from megahead.wording import pluralize

WARM_UP = 3
SHOWN = 15  # of the slowest operations
PACKAGE_NAMES = {"megahead": "megahead", "deepspeed": "DeepSpeed"}
PACKAGE_ROOTS = {name: Path(spec.origin).parent for name in PACKAGE_NAMES if (spec := find_spec(name)) and spec.origin}
BACKWARD = "backward pass"
# Settings with which a run does nothing between or after its steps, and has no store, replicas or tracker
STEPS_ONLY = ("schedule={name: constant}", "tasks=null", "data.validation=null")
TRAINING_ONLY = dict.fromkeys(("evaluate_every", "checkpoint_every", "log_seconds"), 1_000_000_000)
WaitSite = tuple[str, str]  # package, and line


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--config", required=True, help="a run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one setting")
    parser.add_argument("--steps", type=int, default=5, help="steps to record (default: 5)")
    parser.add_argument("--waits", action="store_true", help="count waits for the GPU instead")
    arguments = parser.parse_args()
    config, steps = load_config(arguments.config, arguments.set), arguments.steps
    if not arguments.waits:
        output = arguments.output or Path("trace.json.gz")
        report(profile_steps(config, steps, output))
        print(f"wrote {output}: open it at https://ui.perfetto.dev")
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError("the machine must have a CUDA device to count waits on, but has none.")
    waits = count_waits(config, steps)
    rows = [{"who": who, "a step": n / steps, "where": line} for (who, line), n in waits.most_common()]
    report(rows, output=arguments.output)
    for who in (*PACKAGE_NAMES.values(), BACKWARD):
        total = sum(n for (waiter, _), n in waits.items() if waiter == who)
        print(f"{who}: {pluralize(total / steps, 'wait', 'g')} a step")


def run_steps(config: RunConfig, steps: int, watch: Callable[[int], AbstractContextManager[Any]]) -> None:
    """Trains; step k after the warm-up, from 0, runs inside `watch(k)`."""
    from benchmarks.rows import with_overrides
    from megahead.distributed.launch import Launch
    from megahead.train import loop, run, step

    number = count(-WARM_UP)

    def watched_train_step(*arguments: Any) -> Any:
        k = next(number)
        with nullcontext() if k < 0 else watch(k):
            return step.train_step(*arguments)

    with tempfile.TemporaryDirectory() as folder, patch.object(loop, "train_step", watched_train_step):
        training = {"steps": WARM_UP + steps, **TRAINING_ONLY}
        config = with_overrides(config, f"output_dir={folder}", f"training={training}", *STEPS_ONLY)
        run.pretrain(config, Launch())


def profile_steps(config: RunConfig, steps: int, output: Path) -> list[dict[str, object]]:
    """Writes the trace of `steps` steps; returns a row for each of the operations with the most self time."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    on_gpu = torch.cuda.is_available() and config.engine.device != "cpu"
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])

    def watch(k: int) -> AbstractContextManager[Any]:
        if k == 0:
            profiler.start()
        return record_function(f"step {k + 1}")

    run_steps(config, steps, watch)
    profiler.stop()
    output.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(output))
    events = [event for event in profiler.key_averages() if not event.key.startswith("step ")]
    total_name = f"self_{'device' if on_gpu else 'cpu'}_time_total"
    times = {event.key: (getattr(event, total_name) / 1e3 / steps, event.count) for event in events}
    total = sum(ms for ms, _ in times.values())
    ranked = sorted(times.items(), key=lambda item: -item[1][0])[:SHOWN]
    return [
        {"operation": name, "ms a step": round(ms, 2), "share": f"{ms / total:.0%}", "calls": calls // steps}
        for name, (ms, calls) in ranked
    ]


def count_waits(config: RunConfig, steps: int) -> Counter[WaitSite]:
    """Counts the waits of each line in `steps` steps of `config`."""
    waits: Counter[WaitSite] = Counter()
    run_steps(config, steps, lambda _: record_waits(waits))
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
        for package, root in PACKAGE_ROOTS.items():
            if Path(frame.filename).is_relative_to(root):
                path = Path(frame.filename).relative_to(root.parent)
                return PACKAGE_NAMES[package], f"{path}:{frame.lineno} in {frame.name}"
    return "other", f"{stack[-1].filename}:{stack[-1].lineno}"


if __name__ == "__main__":
    run_command(main)
