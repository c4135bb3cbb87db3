"""The composition root: from a config and a launch to a finished run."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import yaml

from megahead.config import RunConfig, deepspeed_config
from megahead.data import IndexedDataset, training_samples
from megahead.data.training import describe_samples, relative_passes
from megahead.distributed import Launch, Mesh, choose_device, connect
from megahead.engine import Engine
from megahead.errors import ConfigError
from megahead.objectives import build_objective
from megahead.optim import build_adamw
from megahead.parallel import build
from megahead.pretraining import Feed
from megahead.train.describe import describe_run
from megahead.train.evaluation import Evaluation
from megahead.train.faults import StopRequest
from megahead.train.loop import Ending, Training, train
from megahead.train.meters import Meters
from megahead.train.persistence import agreed_group, find_resume, resume_from, save, start_from
from megahead.train.state import TrainingState


def pretrain(config: RunConfig, launch: Launch, resume: str = "auto") -> Ending:
    """Trains `config` to its end, or until it is stopped; called by every rank of `launch`.

    `resume`: `auto` continues from the newest checkpoint in the run's folder if there is one, `never` refuses a
    folder that has one, anything else is the checkpoint to continue from.
    """
    device = choose_device(config.engine.device, launch.local_rank)
    train_sets = [_open(config, part.prefix, "data.train") for part in config.data.parts()]
    held_out = config.data.validation and _open(config, config.data.validation, "data.validation")
    _check_tokenizer(config)
    samples = training_samples(config.data, train_sets, config.seed)
    run_samples = config.training.steps * config.batch.global_size
    mesh = Mesh.build(connect(launch, device, config.engine.timeout_seconds), config.parallel.tensor)
    deepspeed = deepspeed_config(config, mesh.data.size)
    checkpoint = find_resume(resume, Path(config.folder()))
    group_samples = agreed_group(config, mesh.data.size, checkpoint)
    world, data = mesh.world.side_channel(), mesh.data.side_channel()

    state = TrainingState(config.model.padded_vocab_size(), group_samples)
    for dataset, passes in zip(train_sets, relative_passes(samples), strict=True):
        state.note_dataset(dataset, passes)
    objective = build_objective(config.objective, config.model.vocab_size, state.dataset_counts)

    pretraining = build(config, mesh.tensor, device)
    pretraining.backbone.recompute_blocks = config.engine.activation_checkpointing
    if config.init:
        start_from(pretraining, config.init, mesh.tensor)
    optimizer = build_adamw(pretraining, config.optimizer)
    engine = Engine(pretraining, optimizer=optimizer, config=deepspeed, mesh=mesh, device=device)
    if checkpoint is not None:
        resume_from(checkpoint, engine, state, config, data)

    if world.rank == 0:
        _prepare_folder(config)
    meters = Meters(config, active=world.rank == 0)
    facts = [*describe_run(config, world.size, group_samples), *describe_samples(samples, run_samples)]
    meters.banner([*facts, ("on", f"{world.size} x {device.type}")], resumed=checkpoint)
    run = Training(
        config=config,
        engine=engine,
        feed=Feed(
            samples,
            objective,
            config.data,
            config.batch,
            mesh.data.side_channel(),
            group_samples=group_samples,
            seed=config.seed,
        ),
        state=state,
        meters=meters,
        stop=StopRequest(),
        evaluation=Evaluation(config, held_out, data, device) if held_out else None,
        save=partial(save, engine, state, config, data, world),
        device=device,
        data=data,
        world=world,
    )
    ending = train(run)
    meters.close(ending, state)
    return ending


def _open(config: RunConfig, prefix: str, field: str) -> IndexedDataset:
    """The dataset at `prefix`; refused when its ids do not fit the model's vocabulary."""
    dataset = IndexedDataset(prefix)
    if dataset.info is not None and dataset.info.vocab_size > config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"be at least that of {field} ({dataset.info.vocab_size:,})",
            got=f"{config.model.vocab_size:,}",
        )
    return dataset


def _check_tokenizer(config: RunConfig) -> None:
    path = config.data.tokenizer
    if path is not None and not Path(path).is_file():
        raise ConfigError("data.tokenizer", "name a readable file", got=path, hint="or leave it out")


def _prepare_folder(config: RunConfig) -> None:
    """RUN/config.yaml and RUN/tokenizer.json: what a reader of the checkpoints needs to know."""
    folder = Path(config.folder())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    if config.data.tokenizer is not None:
        shutil.copyfile(config.data.tokenizer, folder / "tokenizer.json")
