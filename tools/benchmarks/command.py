"""What the commands of benchmarks share: a config, drawn tokens, `--output`, and how a table is printed and written."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.report.tables import Row, to_json, to_rich
from megahead.terminal import terminal


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--output`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the table's lines there")
    return parser


PYTHIA_VOCABULARY = 50277


def config_of(
    shape: Mapping[str, Any], rows: int, length: int, *overrides: str, masking: Mapping[str, int] | None = None
) -> RunConfig:
    """A headless run of a model of `shape`; its steps are of a micro-batch of `rows` rows of `length` drawn tokens."""
    tree: dict[str, Any] = {"name": "bench", "model": shape, "masking": masking, "training": {"steps": 1}}
    tree |= {"data": {"train": "", "sequence_length": length}, "optimizer": {"learning_rate": 1e-3}}
    tree |= {"batch": {"global_size": rows, "micro_size": rows}}
    return config_from_dict(tree, "the benchmark", overrides)


def zipf_tokens(ids: int, shape: int | tuple[int, ...], seed: int, without: int | None = None) -> npt.NDArray[np.int64]:
    """Tokens by Zipf's law, about as many different ones as in real text; never the id `without`."""
    weights = 1 / (np.arange(ids) + 2.7)
    if without is not None:
        weights[without] = 0.0
    return np.random.default_rng(seed).choice(ids, shape, p=weights / weights.sum())


def report(*tables: Sequence[Row], output: Path | None = None) -> None:
    """Prints tables, and writes the lines of all of them to `output`, if that is given."""
    for lines in tables:
        terminal(width=160).print(to_rich(lines))
    if output is not None:
        output.write_text(to_json([line for lines in tables for line in lines]), encoding="utf-8")


def numbers(text: str) -> list[int]:
    """The integers of `1,2,3`."""
    return [int(part) for part in text.split(",")]
