"""Shared by the benchmark commands: a config, Zipf-distributed tokens, `--output`, printing and writing of tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.report.tables import Row, terminal, to_json, to_rich


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser that has `--output`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the table's lines there")
    return parser


PYTHIA_VOCABULARY = 50277
PADDED_PYTHIA_VOCABULARY = 50304


def build_config(
    shape: Mapping[str, Any], rows: int, sequence_length: int, *overrides: str, masking: Mapping[str, Any] | None = None
) -> RunConfig:
    """The config of a headless run: a model of `shape`, one micro-batch of `rows` x `sequence_length` tokens a step."""
    settings: dict[str, Any] = {"name": "bench", "model": shape, "masking": masking, "training": {"steps": 1}}
    settings |= {"data": {"train": "", "sequence_length": sequence_length}, "optimizer": {"learning_rate": 1e-3}}
    settings |= {"batch": {"global_size": rows, "micro_size": rows}}
    return config_from_dict(settings, "the benchmark", overrides)


def zipf_tokens(
    vocab_size: int, shape: int | tuple[int, ...], seed: int, excluded_id: int | None = None
) -> npt.NDArray[np.int64]:
    """Random tokens that follow Zipf's law, with about as many different ids as real text; never `excluded_id`."""
    weights = 1 / (np.arange(vocab_size) + 2.7)
    if excluded_id is not None:
        weights[excluded_id] = 0.0
    return np.random.default_rng(seed).choice(vocab_size, shape, p=weights / weights.sum())


def report(*tables: Sequence[Row], output: Path | None = None) -> None:
    """Prints the tables, and writes the rows of all of them to `output` as JSON."""
    for rows in tables:
        terminal(width=160).print(to_rich(rows))
    if output is not None:
        output.write_text(to_json([row for rows in tables for row in rows]), encoding="utf-8")


def parse_integers(text: str) -> list[int]:
    """Parses integers separated by commas: `1,2,3`."""
    return [int(part) for part in text.split(",")]
