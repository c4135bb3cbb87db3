"""Steps of one model under larger and larger vocabularies, its embedding dense or in rows: the same ids, in turn."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence

import torch

from benchmarks.engines import Contender, Rows, rank_step
from benchmarks.tokens import token_rows
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.report.tables import to_rich
from megahead.terminal import terminal

KINDS = ("rows", "dense")


def grow(
    config: RunConfig,
    vocabularies: Sequence[int],
    ranks: int,
    prefix: str | None,
    steps: int,
    device: torch.device,
    kinds: Sequence[str] = KINDS,
) -> list[dict[str, object]]:
    """Times `steps` steps of `ranks` ranks under each vocabulary, on ids that the smallest has, and tells; the table's
    lines. A step before them warms up, one after them
    says what memory it takes."""
    smallest = _under(config, min(vocabularies), "dense", ranks)
    rows = token_rows(smallest, prefix, count=(steps + 2) * ranks)
    lines: list[dict[str, object]] = []
    for kind in kinds:
        lines += _timed([_under(config, size, kind, ranks) for size in vocabularies], rows, ranks, steps, device)
    terminal().print(to_rich(lines))
    return lines


def _under(config: RunConfig, vocabulary: int, kind: str, ranks: int) -> RunConfig:
    tree = config.model_dump(mode="json")
    tree["model"]["vocab_size"] = vocabulary
    tree["engine"]["embedding"] = kind
    tree["batch"]["global_size"] = config.batch.micro_size * ranks
    return config_from_dict(tree, f"--vocabulary {vocabulary}")


def _timed(
    configs: Sequence[RunConfig], texts: Sequence[Rows], ranks: int, steps: int, device: torch.device
) -> list[dict[str, object]]:
    """A line for each."""
    with tempfile.TemporaryDirectory() as folder:
        field: list[Contender] = []
        for place, config in enumerate(configs):
            work = [(config, (rank, ranks, f"{folder}/store-{place}"), texts, device) for rank in range(ranks)]
            field.append(Contender("", [(rank_step, one) for one in work], device.type))
        rounds = [[contender.step() for contender in field] for _ in range(steps + 1)][1:]
        peaks = [None if device.type == "cuda" else contender.peak() for contender in field]
        for contender in field:
            contender.stop()
    return [_line(config, rounds, at, peak) for at, (config, peak) in enumerate(zip(configs, peaks, strict=True))]


def _line(
    config: RunConfig, rounds: Sequence[Sequence[tuple[float, float]]], at: int, peak: float | None
) -> dict[str, object]:
    """Medians over rounds, by the clock and of processes, also of the ratios to the first vocabulary."""
    line: dict[str, object] = {"embedding": config.engine.embedding, "vocabulary": config.model.vocab_size}
    for kind, name in enumerate(("", "CPU ")):
        line[f"{name}ms"] = round(statistics.median(times[at][kind] for times in rounds) * 1e3)
    for kind, name in enumerate(("wall", "CPU")):
        line[f"{name} ratio"] = f"{statistics.median(times[at][kind] / times[0][kind] for times in rounds):.2f}"
    return line | ({} if peak is None else {"a step's MiB": round(peak)})
