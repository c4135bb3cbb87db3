"""DeepSpeed's JSON, completed from the run: what this writes may not be set to something else there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megahead.config.run import RunConfig
from megahead.config.shipped import find_named
from megahead.errors import ConfigError, UserError


def deepspeed_config(run: RunConfig, data_ranks: int) -> dict[str, Any]:
    """The content DeepSpeed gets: the file of `engine.deepspeed` plus batch triad, clipping and precision.

    Raises ConfigError where the file already says something else.
    """
    given = run.engine.deepspeed
    given = read_deepspeed(given) if isinstance(given, str) else given
    _refuse_what_writes(given)
    stage = zero_stage(given)
    if stage == 3 and run.engine.activation_checkpointing == "selective":
        raise ConfigError(
            "engine.activation_checkpointing",
            "be true or false at ZeRO stage 3, where DeepSpeed adds to products that would be kept",
            got="`selective`",
        )
    derived: dict[str, Any] = {
        "train_batch_size": run.batch.global_size,
        "train_micro_batch_size_per_gpu": run.batch.micro_size,
        "gradient_accumulation_steps": run.batch.accumulation_steps(data_ranks),
        "gradient_clipping": run.optimizer.gradient_clipping,
        **_precision(run.engine.precision, stage),
    }
    for key, value in derived.items():
        if given.get(key, value) != value:
            raise ConfigError(
                f"engine.deepspeed[{key!r}]",
                f"be left out or agree with the run ({value})",
                got=given[key],
                hint="remove it there",
            )
    return {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9, **given, **derived}


def read_deepspeed(name: str, by: Path | None = None) -> dict[str, Any]:
    """The content of the JSON file that the config in `by` calls `name`; UserError where it cannot be read."""
    try:
        content = json.loads(find_named(name, by).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"`engine.deepspeed` must name a DeepSpeed JSON file, but is {name} instead ({error.strerror})."
        ) from None
    except ValueError as error:
        raise UserError(f"`engine.deepspeed` must name a JSON file, but {name} is not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(
            f"`engine.deepspeed` must hold a JSON object, but {name} holds {type(content).__name__} instead."
        )
    return content


def zero_stage(content: dict[str, Any]) -> int:
    """ZeRO stage of a DeepSpeed configuration: 0, 1, 2 or 3."""
    zero = content.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError("engine.deepspeed.zero_optimization", "be settings of ZeRO", got=repr(zero))
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError("engine.deepspeed.zero_optimization.stage", "be 0, 1, 2 or 3", got=stage)
    return int(stage)


def _refuse_what_writes(content: dict[str, Any]) -> None:
    """Sections that make DeepSpeed write files wherever they say."""
    for key in ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler"):
        if key in content:
            raise ConfigError(
                f"engine.deepspeed[{key!r}]", "be left out (runs log into their own folder)", got=content[key]
            )


def _precision(precision: str, stage: int) -> dict[str, Any]:
    """Gradients of micro-batches are summed up in fp32 in every precision, and sent in the run's.

    At stage 0 DeepSpeed's own 16-bit wrappers take a stray first step: bf16 goes through autocast there.
    """
    if precision == "fp32":
        return {}
    if stage == 0 and precision == "fp16":
        raise ConfigError("engine.precision", "be fp32 or bf16 at ZeRO stage 0", got="fp16", hint="or use stage 1")
    if stage == 0:
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    return {precision: {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
