"""How a run's transformer blocks are computed: by which attention backend, and whether compiled."""

from __future__ import annotations

import importlib.util
import shutil

import torch

from megahead.config import RunConfig
from megahead.estimate.shorter_rows import shorter_layers
from megahead.models import Backbone, CompiledBlocks
from megahead.nn import AttentionSpec, Backend, choose_backend
from megahead.nn.cpu_attention import pays_masked
from megahead.wording import span

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def accelerate_(
    backbone: Backbone, config: RunConfig, device: torch.device, zero_stage: int = 0
) -> list[tuple[str, str]]:
    """Sets up `backbone` as `config.engine` says; returns what was chosen, as (name, value) lines of the banner.

    ConfigError for an attention backend that does not work on this device.
    """
    model, engine = config.model, config.engine
    local, precision = model.local_layers() > 0, _TYPES[engine.precision]
    masked = pays_masked(device, precision, config.data.sequence_length, model.attention_dropout)
    spec = AttentionSpec(device, precision, model.head_size(), model.attention_dropout, local, masked)
    backend = choose_backend(engine.attention, spec)
    backbone.recompute_blocks = engine.activation_checkpointing
    backbone.use_attention(backend.attend)
    lines = [("attention", f"{backend.name} ({backend.description})")]
    if device.type == "cuda" if engine.compile == "auto" else engine.compile:
        obstacle = _obstacle_to_compiling(config, device, zero_stage)
        lines.append(("compiled", f"no, {obstacle}" if obstacle else _what_is_compiled(config)))
        if not obstacle:
            _compile_(backbone, backend)
    return lines


def _compile_(backbone: Backbone, backend: Backend) -> None:
    backbone.compiled = CompiledBlocks()
    if not backend.traceable:
        backbone.use_attention(torch.compiler.disable(backend.attend))


def _what_is_compiled(config: RunConfig) -> str:
    """All blocks but those whose shapes are another batch's each time."""
    plain = [f"{span('layer', part.layers)} (shorter rows)" for part in shorter_layers(config)]
    needs_all = config.model.is_causal or config.objective.replaced_tokens or config.objective.phrases
    if config.model.is_encoder() and not needs_all:
        plain.append("the last (masked tokens alone)")
    return f"one block for all layers{' but ' * bool(plain)}{' and '.join(plain)}"


def _obstacle_to_compiling(config: RunConfig, device: torch.device, zero_stage: int) -> str:
    """Why blocks cannot be compiled, as far as that is known before trying; empty if they can."""
    if config.parallel.tensor > 1:
        return "tensor ranks communicate within a block"
    if zero_stage == 3:
        return "ZeRO 3 gathers weights within a block"
    if config.engine.activation_checkpointing == "selective":
        return "selective checkpointing looks at operations that a compiled block no longer has"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return "there is no C++ compiler"
    return ""
