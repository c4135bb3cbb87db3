"""Profiles training steps: prints the slowest operations and writes a trace.

tools/profile_step.py --config configs/demo-headless.yaml [--set a.b=c] [--steps 3] [--output trace.json.gz]

Open the trace at https://ui.perfetto.dev or chrome://tracing (both work locally, nothing is sent). A step is
that of tools/bench_step.py: forward, backward, clipping, update; the first ones are warm-up and not recorded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megahead.config.loading import load_config
from megahead.data.indexed import IndexedDataset
from megahead.errors import run_command
from megahead.report.tables import terminal, to_rich

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one setting")
    parser.add_argument("--data", metavar="PREFIX", help="dataset (default: the config's)")
    parser.add_argument("--steps", type=int, default=3, help="steps to record (default: 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA where it is there")
    parser.add_argument("--output", type=Path, default=Path("trace.json.gz"), help="default: trace.json.gz")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.set)
    if arguments.data:
        IndexedDataset(arguments.data)  # reports its errors before the slow import of torch
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from benchmarks.rows import token_rows
    from benchmarks.steps import Variant

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    steps = WARM_UP + arguments.steps
    rows = token_rows(config, arguments.data, count=steps * config.batch.accumulation_steps(1))
    variant = Variant(config, config.objective.name, device, rows)
    for index in range(WARM_UP):
        variant.step(index)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        for index in range(WARM_UP, steps):
            with record_function(f"step {index - WARM_UP + 1}"):
                variant.step(index)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(arguments.output))
    console = terminal()
    console.print(to_rich(_slowest_operations(profiler, device, arguments.steps)))
    console.print(f"wrote {arguments.output}: open it at https://ui.perfetto.dev", soft_wrap=True)


def _slowest_operations(trace: profile, device: torch.device, steps: int, count: int = 15) -> list[dict[str, object]]:
    """The operations with the most self time, in ms a step."""
    kind = "device" if device.type == "cuda" else "cpu"
    events = [event for event in trace.key_averages() if not event.key.startswith("step ")]
    times = {event.key: (getattr(event, f"self_{kind}_time_total") / 1e3 / steps, event.count) for event in events}
    total = sum(ms for ms, _ in times.values())
    ranked = sorted(times.items(), key=lambda item: -item[1][0])[:count]
    return [
        {"operation": name, "ms a step": round(ms, 2), "share": f"{ms / total:.0%}", "calls": calls // steps}
        for name, (ms, calls) in ranked
    ]


if __name__ == "__main__":
    run_command(main)
