"""The lines that a run prints while it trains: its progress, evaluations, and bad steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from megahead.evaluate import ValidationResult
from megahead.train.state import TrainingState
from megahead.train.step import StepReport
from megahead.wording import counted, duration, span, thousands

BadSamples = Sequence[tuple[int | None, range]]
"""(rank, its samples) of each bad micro-batch; rank None: all ranks."""

_MAX_NAMED = 4


def progress_line(scalars: Mapping[str, float], state: TrainingState, steps: int, perplexity: float | None) -> str:
    """The training values since the last line, of a run of `steps`; `perplexity`: the last held-out one, if any."""
    remaining = (steps - state.step) * scalars["step_seconds"]
    parts = [
        f"step {state.step:>{len(str(steps))}}/{steps}",
        f"loss {scalars['loss']:.4f}",
        f"lr {scalars['learning_rate']:.2e}",
        f"|g| {scalars['gradient_norm']:.2f}",
        f"{thousands(scalars['tokens_per_second'])} tokens/s",
    ]
    if "detection_loss" in scalars:
        told = {name.removeprefix("detection_"): value for name, value in scalars.items()}
        parts.append(f"generator {scalars['generator_loss']:.4f}  {told_apart(told)}")
    if "phrase_loss" in scalars:
        parts.append(f"phrases {scalars['phrase_loss']:.4f}, found {scalars['phrase_found']:.1%}")
    if "mfu" in scalars:
        parts.append(f"MFU {scalars['mfu']:.1%}")
    if scalars["candidates"]:
        parts.append(counted(scalars["candidates"], "candidate", ",.0f"))
    if perplexity is not None:
        parts.append(f"held out {perplexity:,.1f}")
    if state.skipped_steps:
        parts.append(f"{state.skipped_steps:,} skipped")
    return "  ".join([*parts, f"ETA {duration(remaining)}"])


def held_out_line(result: ValidationResult, state: TrainingState, head: str) -> str:
    """For example: held out at step 500: perplexity 112.3, 1.402 bits per byte, accuracy 31.2% (pmi head)"""
    most = "at most " if result.upper_bound else ""
    whose = "generator's " if result.detection else ""
    told = f"; {told_apart(asdict(result.detection))}" if result.detection else ""
    bits = "" if result.bits_per_byte is None else f", {most}{result.bits_per_byte:.3f} bits per byte"
    return (
        f"held out at step {state.step:,}: {whose}perplexity {most}{result.perplexity:,.1f}{bits}, "
        f"accuracy {result.accuracy:.1%} ({head} head){told}"
    )


def told_apart(detection: Mapping[str, float]) -> str:
    """For example: detection 0.2431, found 48.2% and kept 98.1%"""
    return f"detection {detection['loss']:.4f}, found {detection['found']:.1%} and kept {detection['kept']:.1%}"


def describe_fault(report: StepReport, step: int, bad: BadSamples, state: TrainingState) -> str:
    """For example: step 12: spike (loss 9.1, gradient norm 7, scale 1) on rank 1, samples 88 to 89; 3 skipped so far"""
    where = [
        f"{'' if rank is None else f'rank {rank}, '}{span('sample', samples)}" for rank, samples in bad[:_MAX_NAMED]
    ]
    where += [f"{len(bad) - _MAX_NAMED} more"] if len(bad) > _MAX_NAMED else []
    kind = report.fault.kind if report.fault else "good"
    return (
        f"step {step:,}: {kind} (loss {report.loss:.4g}, gradient norm {report.grad_norm:.4g}, scale "
        f"{report.loss_scale:g}) on {'; '.join(where)}; {state.skipped_steps} skipped so far"
    )
