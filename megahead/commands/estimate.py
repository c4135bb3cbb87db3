"""Estimates from a config whether a run fits into memory, which ZeRO stage it needs, and how long it takes.

megahead estimate --config configs/NAME.yaml --world-size 8 --memory 80 --peak 312 [--utilization 0.4] [--set a.b=c ...]
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from math import inf

from rich.table import Table

from megahead.config.loading import load_config
from megahead.config.plan import RunPlan, phase_names, phases_of
from megahead.config.run import RunConfig
from megahead.errors import ConfigError, require_at_least
from megahead.estimate import (
    FlopsPerToken,
    RankMemory,
    candidate_rows,
    memory_reductions,
    rank_memory,
    run_flops,
    run_parameters,
)
from megahead.report.tables import terminal
from megahead.wording import GIB, pluralize

PARTS = [field.name for field in fields(RankMemory)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one setting")
    parser.add_argument("--world-size", type=int, default=1, help="number of ranks, one per device")
    parser.add_argument("--memory", type=float, default=80, help="GiB of one device")
    parser.add_argument("--peak", type=float, default=312, help="TFLOP/s of one device at the run's precision")
    parser.add_argument("--utilization", type=float, default=0.4, help="share of the peak that is reached")
    arguments = parser.parse_args()
    require_at_least(1, world_size=arguments.world_size)
    require_at_least(0, memory=arguments.memory)
    config = load_config(arguments.config, arguments.set)
    plan = RunPlan.of(config, config.usable_ranks(arguments.world_size))
    console = terminal(soft_wrap=True)
    for line in parameter_lines(plan):
        console.print(line)
    console.print(memory_table(plan, arguments.memory))
    console.print(verdict(plan, arguments.memory))
    flops_per_second = plan.ranks * arguments.peak * 1e12 * arguments.utilization
    console.print(training_time(plan, flops_per_second))


def parameter_lines(plan: RunPlan) -> list[str]:
    """Lines: the run's parameters, then each phase's FLOPs per token, with shares by part."""
    config, counts = plan.config, run_parameters(plan.config)
    total = f"{counts.total:,} parameters: body {counts.body:,}, embedding {counts.embedding:,}, head {counts.head:,}"
    total += f", generator {counts.generator:,}" if counts.generator else ""
    phases = phases_of(config)
    lines = [total]
    for phase_name, phase in zip(phase_names(phases), phases, strict=True):
        flops = _flops(phase.config, plan.data_ranks)
        flops_by_part = {"body": flops.body, "attention": flops.attention, "candidates": flops.head}
        shares = ", ".join(f"{part} {value / flops.total:.0%}" for part, value in flops_by_part.items())
        lines.append(f"{flops.total / 1e9:.3g} GFLOP a token ({phase_name}): {shares}")
    return lines


def _flops(config: RunConfig, data_ranks: int) -> FlopsPerToken:
    return run_flops(config, candidate_rows(config, data_ranks), data_ranks)


def zero_stages(config: RunConfig) -> list[int]:
    """ZeRO stages that support the run's precision and activation checkpointing."""
    lowest, is_selective = int(config.engine.precision == "fp16"), config.engine.activation_checkpointing == "selective"
    return [*range(lowest, 3 if is_selective else 4)]


def memory_table(plan: RunPlan, budget: float) -> Table:
    """GiB per rank: a column per ZeRO stage, a line per part of memory."""
    mesh = f"{plan.config.parallel.tensor} tensor x {pluralize(plan.data_ranks, 'data rank')}"
    memory = {stage: rank_memory(plan, stage) for stage in zero_stages(plan.config)}
    table = Table(title=f"GiB a rank on {mesh}, {plan.config.engine.precision}")
    table.add_column("")
    for stage in memory:
        table.add_column(f"ZeRO {stage}", justify="right")
    for part in [*PARTS, "total"]:
        table.add_row(part, *(f"{getattr(needed, part) / GIB:.2f}" for needed in memory.values()))
    fits = ("yes" if needed.total <= budget * GIB else "no" for needed in memory.values())
    table.add_row(f"fits {budget:g}", *fits)
    return table


def verdict(plan: RunPlan, budget: float) -> str:
    """The lowest stage that fits, or what to change."""
    fitting_stages = [stage for stage in zero_stages(plan.config) if rank_memory(plan, stage).total <= budget * GIB]
    if fitting_stages:
        return f"ZeRO {fitting_stages[0]} is enough (the config has {plan.zero_stage})."
    return f"No stage fits: {', or '.join(memory_reductions(plan, 3))}."


def training_time(plan: RunPlan, flops_per_second: float) -> str:
    """The estimated duration of the run."""
    if not 0 < flops_per_second < inf:
        raise ConfigError("--peak x --utilization", "be above 0 and finite", got=flops_per_second)
    config = plan.config
    tokens = config.training.steps * config.tokens_per_step()
    step_flops = sum(_flops(phase.config, plan.data_ranks).total * len(phase.steps) for phase in phases_of(config))
    hours = step_flops * config.tokens_per_step() / flops_per_second / 3600
    days = f"{hours / 24:,.3g} days" if hours >= 48 else f"{hours:,.3g} hours"
    duration = days if hours >= 2 else pluralize(60 * hours, "minute", ",.3g")
    return f"{tokens:,} tokens at {flops_per_second / 1e12:,.4g} TFLOP/s (--peak x --utilization): {duration}."
