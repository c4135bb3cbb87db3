"""Completes DeepSpeed's JSON from the run's config; a value in the JSON that contradicts the config is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megahead.config.run import RunConfig
from megahead.config.shipped import find_named
from megahead.config.zero_tuning import tuned_settings
from megahead.errors import ConfigError, UserError

_OWN_LOG = "runs log into their own folder"
_OTHERS_DECIDE = {
    **dict.fromkeys(("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler"), _OWN_LOG),
    "optimizer": "the run's own `optimizer` is used",
    "scheduler": "the run's own `schedule` is used",
    "bfloat16": "engine.precision decides",
}
"""Keys of DeepSpeed's JSON that must be left out, and why."""


def deepspeed_config(run: RunConfig, data_ranks: int, device: str = "cpu") -> dict[str, Any]:
    """The settings that DeepSpeed gets: those of `engine.deepspeed` plus batch sizes, clipping and precision.

    `engine.deepspeed` may set what the run does not, such as fp16's dynamic loss scale. Buckets and other settings of
    gradient communication that it leaves out are chosen for `device`. ConfigError if it contradicts the run.
    """
    given = run.engine.deepspeed
    given = read_deepspeed(given) if isinstance(given, str) else given
    _refuse_what_others_decide(given)
    stage = zero_stage(given)
    if stage == 3 and run.engine.activation_checkpointing == "selective":
        raise ConfigError(
            "engine.activation_checkpointing",
            "be true or false at ZeRO stage 3, where DeepSpeed adds to products that would be kept",
            got="`selective`",
        )
    zero = _section(given, "zero_optimization")
    given = _completed(given, tuned_settings(zero, device, run.engine.precision, data_ranks))
    derived: dict[str, Any] = {
        "train_batch_size": run.batch.global_size,
        "train_micro_batch_size_per_gpu": run.batch.micro_size,
        "gradient_accumulation_steps": run.batch.accumulation_steps(data_ranks),
        "managed_gradient_accumulation": True,
        "gradient_clipping": run.optimizer.gradient_clipping,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    _must_agree("", given, derived, "the run")
    _must_agree("['zero_optimization']", _section(given, "zero_optimization"), {"compute_grad_norm": True}, "the run")
    for name, wanted in _formats(run.engine.precision, stage).items():
        section = _section(given, name)
        _must_agree(f"[{name!r}]", section, wanted, f"engine.precision={run.engine.precision}")
        derived[name] = section | wanted
    return {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9, **given, **derived}


def read_deepspeed(name: str, by: Path | None = None) -> dict[str, Any]:
    """The content of the JSON file that the config file `by` calls `name`; UserError if it cannot be read."""
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
    stage = _section(content, "zero_optimization").get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError("engine.deepspeed.zero_optimization.stage", "be 0, 1, 2 or 3", got=stage)
    return int(stage)


def _section(content: dict[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"engine.deepspeed[{name!r}]", "be a section of settings", got=repr(section))
    return section


def _completed(content: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`content` with what it leaves out from `defaults`, also within sections."""
    sections = {
        name: value | _section(content, name) if isinstance(value, dict) else content.get(name, value)
        for name, value in defaults.items()
    }
    return content | sections


def _refuse_what_others_decide(content: dict[str, Any]) -> None:
    for key, who in _OTHERS_DECIDE.items():
        if key in content:
            raise ConfigError(f"engine.deepspeed[{key!r}]", f"be left out ({who})", got=content[key])


def _must_agree(section: str, given: dict[str, Any], wanted: dict[str, Any], with_what: str) -> None:
    for key, value in wanted.items():
        if given.get(key, value) != value:
            raise ConfigError(
                f"engine.deepspeed{section}[{key!r}]",
                f"be left out or agree with {with_what} ({value})",
                got=given[key],
                hint="remove it there",
            )


def _formats(precision: str, stage: int) -> dict[str, dict[str, Any]]:
    """The required settings of the sections on number formats, by name. In every precision gradients of micro-batches
    are summed in fp32 and sent in the run's format, overflows are found, and weights and moments are kept in fp32.

    At stage 0 DeepSpeed's own 16-bit wrappers take an optimizer step with zero gradients when they are made, so bf16
    uses autocast there.
    """
    if stage == 0 and precision == "fp16":
        raise ConfigError("engine.precision", "be fp32 or bf16 at ZeRO stage 0", got="fp16", hint="or use stage 1")
    formats: dict[str, dict[str, Any]] = {name: {"enabled": False} for name in ("bf16", "fp16", "torch_autocast")}
    if precision == "bf16" and stage == 0:
        formats["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif precision == "bf16":
        whole = {"bf16_master_weights_and_grads": False, "bf16_optimizer_states": False}
        formats["bf16"] = {"enabled": True, "check_grad_overflow": True, **whole}
    elif precision == "fp16":
        formats["fp16"] = {"enabled": True, "fp16_master_weights_and_grads": False}
    return formats
