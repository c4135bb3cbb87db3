"""Elastic runs: which of the launcher's ranks train, and what the others do meanwhile.

The global batch, the objective and the order of the data depend on no mesh, so a run may go on with another number of
ranks from its newest checkpoint. torchrun's agents decide who is there; nothing here starts or ends a rank of another.
"""

from __future__ import annotations

import json

from megahead.config import RunConfig, RunPlan
from megahead.copies import NodeMemory, hand_over
from megahead.distributed import Launch, look_on
from megahead.errors import ConfigError, UserError
from megahead.train.identity import is_within
from megahead.train.run import Run
from megahead.wording import counted, listed

LOST_HOST_SECONDS = 20.0
"""A machine that has not answered for so long is done without. Others wait `engine.timeout_seconds` for its ranks."""


def elastic_launch(config: RunConfig, launch: Launch) -> Launch:
    """`launch` with as many ranks as `config` uses; UserError where its ranks could not meet again."""
    if not config.parallel.elastic:
        return launch
    if launch.keeps_store:
        raise UserError(
            "`parallel.elastic` needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in every torchrun's environment, but it is "
            "missing, and ranks that meet again would not find each other; export it, or start launch/elastic.sh."
        )
    if launch.ranks_per_node % config.parallel.tensor:
        rule = f"divide the ranks of a node ({launch.ranks_per_node}) under parallel.elastic"
        raise ConfigError("parallel.tensor", rule, got=config.parallel.tensor)
    return launch.using(config.usable_ranks(launch.world_size), LOST_HOST_SECONDS)


def describe_elastic(plan: RunPlan, launch: Launch) -> list[tuple[str, str]]:
    """The banner's line on ranks that wait, and on who would start lost ones again."""
    if not plan.config.parallel.elastic:
        return []
    there = launch.world_size + launch.spare_ranks
    parts = [f"{plan.ranks} of {counted(there, 'rank')} train"]
    if not launch.restarts:
        parts.append("nothing starts lost ranks again: torchrun's --max-restarts would, launch/elastic.sh")
    return [("elastic", "; ".join(parts))]


def wait_for_end(config: RunConfig, launch: Launch) -> Run:
    """A rank beyond those that train waits until they end; LostRankError when they fail. What it returns is how the run
    was left, without an evaluation."""
    if launch.rank == launch.world_size:
        print(_who_waits(config, launch), flush=True)
    folder, copies = config.folder(), config.training.copy_every is not None
    if copies:
        hand_over(folder, launch)
    look_on(launch, config.engine.timeout_seconds, settings_of(config))
    if copies:
        NodeMemory.of(folder).remove()
    ending = json.loads(folder.ending.read_text(encoding="utf-8"))
    return Run(folder, ending["step"], ending["ending"], None)


def _who_waits(config: RunConfig, launch: Launch) -> str:
    train, there = launch.world_size, launch.world_size + launch.spare_ranks
    return (
        f"{listed('rank', range(train, there))} {'waits' if launch.spare_ranks == 1 else 'wait'}: "
        f"{counted(config.batch.global_size, 'row')} a step in micro-batches of {config.batch.micro_size} can be split "
        f"over {train} of {counted(there, 'rank')}"
    )


_PLACES = ("output_dir", "data", "engine.deepspeed", "init", "tasks")
"""What may be called otherwise on each node: paths, and sections that have some."""


def settings_of(config: RunConfig) -> dict[str, str]:
    """The settings that all ranks must have alike."""
    return {name: str(value) for name, value in config.flat().items() if not is_within(name, _PLACES)}
