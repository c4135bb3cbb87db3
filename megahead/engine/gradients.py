"""Discards accumulated gradients, so that the next step begins without any.

DeepSpeed does so only inside a step that it does not apply, and not with all: with the optimizer on the host (stages 1
and 2) the fp32 sums of half-precision gradients stay, and every later step adds to sums that are not finite. So
everything that its optimizers (0.19) hold between two steps is discarded here, on any device.
"""

from __future__ import annotations

from typing import Any


def discard_gradients(optimizer: Any, stage: int) -> None:
    """Discards all gradients that `optimizer`, a DeepSpeedEngine's at ZeRO `stage`, accumulated since its last step.

    Sends nothing, but every rank must call it. Weights, moments and loss scale stay.
    """
    optimizer.zero_grad()
    if stage == 3:
        _discard_slices(optimizer)
    elif hasattr(optimizer, "averaged_gradients"):  # unlike stage 0's, and the one for bf16 at stage 1
        _discard_parts(optimizer)


def _discard_parts(optimizer: Any) -> None:
    """Stages 1 and 2."""
    optimizer.micro_step_id = -1  # the next gradients replace what is there, and are not added to it
    for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        sums.update(dict.fromkeys(sums))
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()  # waits for copies to the host; clears their norms and overflow flags


def _discard_slices(optimizer: Any) -> None:
    """Stage 3: does what DeepSpeed's step does when it applies nothing, in this order."""
    optimizer._pre_step()
    optimizer._partition_all_parameters()
    optimizer._overflow_clean_up(optimizer.loss_scale)
