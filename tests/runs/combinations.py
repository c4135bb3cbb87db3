"""Combines settings at random. A combination is refused in a sentence, or keeps what every run promises.

PYTHONPATH=.:tests python tests/runs/combinations.py [--count 100] [--seed 0] [--first 0]

On its mesh it learns what one process learns with a dense embedding, it resumes bit for bit, continues in one process,
and is exported. In half precision and with dropout its losses need only be similar.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import support.heavy_imports  # noqa: F401 - else every rank would import them
from megahead.checkpoints.disk import step_folders
from megahead.checkpoints.reading import open_checkpoint
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import UserError
from megahead.hf.export import export
from megahead.hf.heads import best_head
from megahead.hf.trained import TrainedModel
from megahead.report.read import Record, read_metrics
from megahead.train.run import pretrain
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, write_text

Settings = dict[str, Any]
Choice = tuple[float, Sequence[Settings]]
"""A probability, and the alternatives of which one is taken with it."""

STEPS = 4


def values(path: str, *alternatives: Any) -> list[Settings]:
    return [{path: value} for value in alternatives]


NO_DROPOUT: Settings = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
LLAMA: Settings = {"model.family": "llama"}
GEMMA: Settings = {"model.family": "gemma3", "model.local_window": 6, "model.global_every": 2}
DECODER: list[Choice] = [
    (
        0.75,
        [
            {"model.parallel_residual": False, "model.activation": "gelu"},
            *(LLAMA | {"model.num_key_heads": heads} for heads in (1, 2)),
            LLAMA | {"model.qk_norm": True, "model.head_dim": 16},
            LLAMA | {"model.attention_bias": "qkv", "model.mlp_bias": True},
            LLAMA | {"model.rotary_scaling": {"kind": "linear", "factor": 2}},
            {"model.family": "gpt2"},
            {"model.family": "gpt2", **NO_DROPOUT},
            GEMMA | {"model.num_key_heads": 1},
        ],
    ),
    (0.3, values("objective.multi_token.heads", 1, 2)),
    (0.2, [{"masked_inputs": {"mask_token": 60, "share": 0.3}, "model.vocab_size": 61}]),
    (0.2, values("model.vocab_multiple", 1, 50)),
]
MODERNBERT: Settings = {"model.family": "modernbert", "model.local_window": 6, "model.intermediate_size": 64}
PADDED: Settings = {"model.vocab_size": 64, "model.position_offset": 64, "masking.special_tokens": [63]}
ENCODER: list[Choice] = [
    (1, [{"model.vocab_size": 63, "model.max_positions": 32}]),
    (1, [{"masking.mask_token": 60, "masking.cls_token": 61, "masking.sep_token": 62}]),
    (
        1,
        [
            {"model.family": "bert", **NO_DROPOUT},
            {"model.family": "bert", "model.token_types": 0, **NO_DROPOUT},
            {"model.family": "bert"},
            {"model.family": "xlm_roberta", **NO_DROPOUT, **PADDED},
            MODERNBERT,
            MODERNBERT,
        ],
    ),
    (0.5, values("model.num_layers", 3, 4)),
    (0.6, values("masking.rate", 0.3, 0.5)),
    (0.5, values("masking.strategy", "span", "frequency", "informative", "hardest", "pmi")),
    (0.3, values("masking.count", "bernoulli")),
    (0.2, [{"masking.final_rate": 0.6}, {"masking.final_rate": 0.1, "masking.rate_course": "cosine"}]),
    (0.2, [{"masking.noise_share": 0.1}, {"masking.mask_share": 1.0, "masking.random_share": 0.0}]),
    (0.2, [*values("masking.masks_from_layer", 1), *values("masking.mask_decoder_layers", 1)]),
    (0.2, values("masking.diffusion", True)),
    (0.2, [{"masking.dropping": {"from_layer": 0, "to_layer": 1, "by": by}} for by in ("hardest", "frequency")]),
    (
        0.6,
        [
            *values("objective.replaced_tokens", {"weight": 5.0}, {"draws": "vocabulary"}),
            *values("objective.phrases", {"group_samples": 2}, {"group_samples": 3}),
            *values("objective.retromae", {}, {"bag_weight": 0.5}),
            *values("objective.tsdae", {}),
        ],
    ),
    (0.15, [*values("objective.schedule.causal_share", 0.5), MODERNBERT | {"model.is_causal": True}]),
    (0.3, values("masking.adapt_every", 2)),
]
HEADLESS: list[Choice] = [
    (0.2, [{"objective.score": "cosine", "objective.temperature": 0.1}, {"objective.score": "harmonic"}]),
    (0.2, values("objective.temperature", 0.5, 3.0)),
    (0.2, values("objective.learned_temperature", True)),
    (0.5, values("objective.group_samples", 1, 4, 8)),
    (0.4, values("objective.bias", "once", "corrected", "own_once")),
    (0.3, [{"objective.negatives": 20}, {"objective.negatives": 9, "objective.negatives_from": "uniform"}]),
    (0.2, values("objective.max_candidates", 12)),
    (0.2, values("objective.vanilla_weight", 0.3)),
    (0.15, values("objective.candidates", "own")),
    (0.15, values("objective.schedule.vanilla_share", 0.5)),
    (0.2, values("optimizer.table.rule", "adamw_row", "adagrad")),
]
VANILLA: list[Choice] = [
    (1, values("objective.name", "vanilla")),
    (0.6, [{"objective.tied": True}, {"objective.output_bias": True}, {"objective.score": "cosine"}]),
]
COURSE: list[Choice] = [
    (0.4, [{"data.pack": "best_fit"}, {"data.pack": "best_fit", "data.documents_a_row": 1}]),
    (0.2, values("data.isolate_documents", False)),
    (0.2, values("data.boundary_targets", False)),
    (0.2, [{"data.prefetch": 0}, {"data.read_ahead": "system"}]),
    (0.4, values("data.sequence_length", 6, 23, 32)),
    (0.1, values("data.validation", None)),
    (0.5, [{"batch.global_size": rows, "batch.micro_size": micro} for rows, micro in ((12, 3), (4, 1), (16, 8))]),
    (0.3, [{"model.hidden_size": 48, "model.num_heads": 2}, {"model.hidden_size": 64, "model.num_heads": 8}]),
    (0.3, [{"optimizer.name": "muon"}, {"optimizer.name": "muon", "optimizer.muon.momentum": 0.0}]),
    (0.3, values("optimizer.table.learning_rate_ratio", 0.25)),
    (0.2, values("optimizer.gradient_clipping", 0.0)),
    (0.2, values("optimizer.weight_decay", 0.0)),
    (0.5, [*values("schedule.name", "triangular", "constant"), {"schedule.name": "wsd", "schedule.decay_steps": 0.5}]),
]
MESH: list[Choice] = [
    (0.3, values("parallel.sequence", True)),
    (0.3, values("engine.activation_checkpointing", True, "selective")),
    (0.5, values("engine.embedding", "rows", "dense")),
    (0.15, values("engine.precision", "bf16")),
    (0.2, values("engine.attention", "documents", "sdpa")),
    (0.2, values("training.save_in_background", True)),
    (0.2, values("training.keep_best", 1)),
    (0.1, values("training.replicate_every", 1)),
    (0.2, values("faults.replicas_every", 1)),
]
MESHES = [(1, 1), (1, 2), (1, 2), (1, 2), (2, 1), (2, 1), (2, 2)]
"""Tensor ranks and data ranks."""

ONE_PROCESS: Settings = {
    "parallel.tensor": 1,
    "parallel.sequence": False,
    "engine.deepspeed": {"zero_optimization": {"stage": 0}},
    "engine.activation_checkpointing": False,
    "engine.precision": "fp32",
}


class Broken(Exception):
    """A promise that was not kept."""


def draw(chance: random.Random) -> tuple[Settings, int]:
    """Settings by path, and a number of ranks."""
    tables = [chance.choice([DECODER, ENCODER]), chance.choice([HEADLESS, HEADLESS, VANILLA]), COURSE, MESH]
    settings: Settings = {}
    for share, alternatives in (choice for table in tables for choice in table):
        if chance.random() < share:
            settings |= chance.choice(alternatives)
    tensor, data = chance.choice(MESHES)
    zero: Settings = {"stage": chance.choice([0, 0, 1, 1, 2, 3])}
    zero |= {"reduce_bucket_size": 2000, "stage3_param_persistence_threshold": 0}  # as large as such a model needs
    zero |= {"offload_optimizer": {"device": "cpu"}} if chance.random() < 0.15 else {}
    return settings | {"parallel.tensor": tensor, "engine.deepspeed": {"zero_optimization": zero}}, tensor * data


def examine(folder: Path, settings: Settings, ranks: int) -> str:
    """`sound`, or a sentence that refuses; Broken otherwise."""
    told = leave_out_refused(folder, settings) or train_on(ranks, config_of(folder / "mesh", settings))
    if told:
        return told
    meshed = config_of(folder / "mesh", settings)
    rows = meshed.optimizer.table.rule != "adamw"
    alone = settings | ONE_PROCESS | {"engine.embedding": "rows" if rows else "dense"}
    _train_on(1, config_of(folder / "alone", alone), "alone")
    compare(folder / "mesh", folder / "alone", meshed, "alone")
    _train_on(ranks, _moved(meshed, without_newest(folder / "mesh", folder / "resumed")), "resumed")
    if not same_tensors(folder / "mesh", folder / "resumed"):
        raise Broken("resumed: not bit for bit")
    if meshed.engine.precision == "fp32":
        without_newest(folder / "mesh", folder / "continued")
        _train_on(1, config_of(folder / "continued", alone), "continued in one process")
        compare(folder / "continued", folder / "mesh", meshed, "continued in one process")
    if told := on_ranks(1, _export, folder / "mesh", folder / "hf")[0]:
        raise Broken(f"export: {told}")
    return "sound"


def config_of(run: Path, settings: Settings) -> RunConfig:
    fixed = {
        "output_dir": str(run),
        "optimizer.eps": 1e-4,  # large beside rounding: a gradient that is zero but for it takes no step of its sign
        "training.steps": STEPS,
        "training.checkpoint_every": STEPS // 2,
        "training.evaluate_every": STEPS // 2,
    }
    return small_config(run.parent, fixed | settings)


def leave_out_refused(folder: Path, settings: Settings) -> str:
    """Leaves out of `settings` what sentences name, one after the other, until none is left; else the last sentence."""
    while True:
        try:
            config_of(folder / "mesh", settings)
        except UserError as error:
            named = re.findall(r"`([\w.]+)`", str(error))
            refused = [path for path in settings for name in named if f"{path}.".startswith(f"{name}.")]
            if not refused:
                return str(error)
            for path in refused:
                settings.pop(path, None)
        else:
            return ""


def train_on(ranks: int, config: RunConfig) -> str:
    """A sentence of all ranks that refuse the run; Broken if only some do, or if it does not finish."""
    told = on_ranks(ranks, _train, config)
    if len(set(map(bool, told))) > 1:
        raise Broken(f"ranks disagree: {told}")
    return str(told[0])


def _train_on(ranks: int, config: RunConfig, what: str) -> None:
    if told := train_on(ranks, config):
        raise Broken(f"{what}: {told}")


def _train(group: Group, config: RunConfig) -> str:
    _hush()
    try:
        ending = pretrain(config, Launch()).ending
        return "" if ending == "finished" else ending
    except UserError as error:
        return str(error)


def _export(group: Group, run: Path, output: Path) -> str:
    _hush()
    model = TrainedModel.open(run)
    head = "none" if model.config.model.qk_norm else best_head(model)  # no class has a bias beside these norms
    try:
        export(run, output, head)
    except UserError as error:
        return str(error)
    return ""


def _hush() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def without_newest(run: Path, copy: Path) -> Path:
    """A copy of a run that has lost its last checkpoint."""
    shutil.copytree(run, copy)
    shutil.rmtree(next(iter(step_folders(copy))))
    return copy


def _moved(config: RunConfig, run: Path) -> RunConfig:
    return config_from_dict(config.model_dump(mode="json", exclude_unset=True) | {"output_dir": str(run)})


def compare(ours: Path, theirs: Path, config: RunConfig, what: str) -> None:
    """Broken unless both runs logged the same losses, norms and evaluations, and ended with the same weights."""
    exact = config.engine.precision == "fp32" and config.model.hidden_dropout == 0
    mine, others = read_metrics(ours), read_metrics(theirs)
    _compare_logs(mine.training, others.training, "loss", 2e-5 if exact else 0.05, what)
    _compare_logs(mine.training, others.training, "gradient_norm", 1e-4 if exact else 0.2, what)
    _compare_logs(mine.validation, others.validation, "loss", 2e-5 if exact else 0.05, f"{what}, held out")
    if not exact:
        return
    checkpoint, other = open_checkpoint(ours), open_checkpoint(theirs)
    names, expected = ({name for name in c.names() if name.startswith("weight/")} for c in (checkpoint, other))
    if names != expected:
        raise Broken(f"{what}: weights {names ^ expected}")
    allowed = 2e-3 if config.optimizer.name == "muon" else 3e-5  # Muon makes all directions of a gradient equally long
    for name in sorted(names):
        distance = float((checkpoint.read(name) - other.read(name)).abs().max())
        if distance > allowed:
            raise Broken(f"{what}: {name} is {distance:.1e} away")


def _compare_logs(ours: Iterable[Record], theirs: Iterable[Record], name: str, allowed: float, what: str) -> None:
    mine, others = ({record["step"]: record[name] for record in log} for log in (ours, theirs))
    far = [step for step in mine if step in others and abs(mine[step] - others[step]) > allowed * abs(others[step])]
    if mine.keys() != others.keys() or far:
        raise Broken(f"{what}: {name} {mine} and {others}")


def combine(folder: Path, count: int, seed: int, first: int = 0) -> Counter[str]:
    """How many combinations ended how; AssertionError with those that broke a promise."""
    endings: Counter[str] = Counter()
    broken = []
    for case in range(first, first + count):
        settings, ranks = draw(random.Random(f"{seed} {case}"))
        place, start = folder / str(case), time.monotonic()
        place.mkdir(parents=True)
        write_text(place)
        try:
            ending = examine(place, settings, ranks)
        except (Broken, AssertionError) as error:
            broken.append(f"case {case} of seed {seed} on {ranks} ranks: {error}\n{settings}")
            ending = f"BROKEN: {broken[-1]}"
        endings["sound" if ending == "sound" else "refused"] += 1
        print(f"{case} ({time.monotonic() - start:.0f} s): {ending}", file=sys.stderr, flush=True)
        shutil.rmtree(place)
    assert not broken, f"{len(broken)} broken, the first: {broken[0]}"
    return endings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(dict(combine(Path(folder), arguments.count, arguments.seed, arguments.first)))


if __name__ == "__main__":
    main()
