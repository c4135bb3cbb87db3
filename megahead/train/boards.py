"""Writes a run's curves to TensorBoard, and to W&B, Trackio or MLflow if the config names them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megahead.config.run import RunConfig
from megahead.errors import ConfigError, message_of
from megahead.wording import print_line


class Board:
    """A destination for curves. A resumed run continues its earlier curves, which are identified by its folder."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Adds values by their full names."""

    def discard_after(self, step: int) -> None:
        """Discards values of later steps, of this session (one start of the processes) and earlier ones, if
        possible."""

    def close(self) -> None:
        """Writes buffered values."""


class TensorBoard(Board):
    """Files in the run's folder; steps that were rolled back are not shown."""

    def __init__(self, config: RunConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(config.folder().tensorboard))

    def add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def discard_after(self, step: int) -> None:
        self._writer.close()
        self._writer.purge_step = step + 1  # written to the file that the next value creates

    def close(self) -> None:
        self._writer.close()


class Tracker(Board):
    """A service that cannot discard values: a repeated step is logged twice. After a failure (of the network, for
    example) it gets no more values in this session; training continues."""

    def __init__(self, name: str, log: Callable[[dict[str, float], int], object], finish: Callable[[], object]) -> None:
        self._name, self._log, self._finish, self._failed = name, log, finish, False

    def add(self, values: Mapping[str, float], step: int) -> None:
        if not self._failed:
            self._try(lambda: self._log(dict(values), step))

    def close(self) -> None:
        self._try(self._finish)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # of any type: packages have their own
            if not self._failed:
                reason = " ".join(message_of(error).split())
                print_line(f"{'warning':<12}{self._name} gets no more curves of this session ({reason})")
            self._failed = True


def _wandb(wandb: Any, config: RunConfig) -> Board:
    run = wandb.init(
        project=config.training.wandb,
        name=config.name,
        id=_identity(config),
        resume="allow",
        dir=str(config.folder()),
        config=config.model_dump(mode="json"),
    )
    run.define_metric("*", step_metric="step")  # W&B's own step cannot decrease, as after a rollback
    return Tracker("wandb", lambda values, step: run.log({**values, "step": step}), run.finish)


def _trackio(trackio: Any, config: RunConfig) -> Board:
    name = f"{config.name}-{_identity(config)[:6]}"  # resuming finds the run by its name
    settings = config.model_dump(mode="json")
    run = trackio.init(project=config.training.trackio, name=name, resume="allow", config=settings, embed=False)
    return Tracker("trackio", lambda values, step: run.log(values, step=step), trackio.finish)


_REFUSED_BY_MLFLOW = re.compile(r"[^\w\-. :/]")
"""Characters that a metric's name may not have, as in mean_ndcg@10."""


def _mlflow(mlflow: Any, config: RunConfig) -> Board:
    mlflow.set_experiment(config.training.mlflow)
    identity = _identity(config)
    runs = mlflow.search_runs(filter_string=f"tags.megahead = '{identity}'", output_format="list")
    mlflow.start_run(run_id=runs[0].info.run_id if runs else None, run_name=config.name, tags={"megahead": identity})
    mlflow.log_dict(config.model_dump(mode="json"), "config.json")

    def log(values: dict[str, float], step: int) -> None:
        mlflow.log_metrics({_REFUSED_BY_MLFLOW.sub("_", name): value for name, value in values.items()}, step=step)

    return Tracker("mlflow", log, mlflow.end_run)


TRACKERS: dict[str, Callable[[Any, RunConfig], Board]] = {"wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
"""By package name, also the setting's name in `training`."""


def _configured_trackers(config: RunConfig) -> list[str]:
    return [name for name in TRACKERS if getattr(config.training, name) is not None]


def require_trackers(config: RunConfig) -> None:
    """ConfigError if the run asks for a tracker that is not installed."""
    for name in _configured_trackers(config):
        if find_spec(name) is None:
            hint = f"pip install -e '.[{name}]'"
            raise ConfigError(f"training.{name}", f"be left out where {name} is not installed", got="given", hint=hint)


def open_boards(config: RunConfig) -> list[Board]:
    """Opens TensorBoard, and the trackers that the config names. ConfigError for one that cannot be opened."""
    return [TensorBoard(config), *(_open_tracker(name, config) for name in _configured_trackers(config))]


def _open_tracker(name: str, config: RunConfig) -> Board:
    try:
        return TRACKERS[name](import_module(name), config)
    except Exception as error:  # of any type: packages have their own
        rule, reason = f"be left out where {name} cannot be opened", " ".join(message_of(error).split())
        raise ConfigError(f"training.{name}", rule, got=f"given ({reason})") from error


def _identity(config: RunConfig) -> str:
    return hashlib.sha256(str(config.folder().path.resolve()).encode()).hexdigest()[:16]
