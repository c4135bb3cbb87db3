"""Gathered gradients, forgotten: the next step begins as if there had never been any.

DeepSpeed forgets them inside of a step that it does not apply, and not all of them: with the optimizer on the host
(stages 1 and 2) the fp32 sums of half-precision gradients stay, and those of every later step are added to what was not
finite. What each of its optimizers (0.19) holds between two steps is therefore let go here, whatever the device.
"""

from __future__ import annotations

from typing import Any


def forget_gradients(optimizer: Any, stage: int) -> None:
    """Drops all that `optimizer`, a DeepSpeedEngine's at ZeRO `stage`, gathered since its last step.

    Sends nothing, but must be called by every rank. Weights, moments and loss scale are not touched.
    """
    optimizer.zero_grad()
    if stage == 3:
        _forget_slices(optimizer)
    elif hasattr(optimizer, "averaged_gradients"):  # unlike stage 0's, and the one for bf16 at stage 1
        _forget_parts(optimizer)


def _forget_parts(optimizer: Any) -> None:
    """Stages 1 and 2."""
    optimizer.micro_step_id = -1  # what is there is not added to
    for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        sums.update(dict.fromkeys(sums))
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()  # waits for copies on their way to the host; their norms, and what overflowed


def _forget_slices(optimizer: Any) -> None:
    """Stage 3: what its step does when it applies nothing, in this order."""
    optimizer._pre_step()
    optimizer._partition_all_parameters()
    optimizer._overflow_clean_up(optimizer.loss_scale)
