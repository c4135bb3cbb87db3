"""fp16's loss scale: the factor by which losses are multiplied, so that small gradients do not become zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SEARCH = frozenset({"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"})
"""Attributes of DeepSpeed's `DynamicLossScaler` that change during training."""


class LossScale:
    """The loss scale of DeepSpeed's `optimizer`; 1 in other precisions than fp16."""

    def __init__(self, optimizer: Any) -> None:
        self._scaler = getattr(optimizer, "loss_scaler", None)
        if self.is_dynamic:
            self._scaler.raise_error_at_min_scale = False  # type: ignore[union-attr] # the guard decides

    @property
    def value(self) -> float:
        """Its present value."""
        return float(getattr(self._scaler, "cur_scale", 1.0))

    @property
    def is_dynamic(self) -> bool:
        """Whether overflows lower it, so that they are normal."""
        return bool(getattr(self._scaler, "dynamic", False))

    def state(self) -> dict[str, float]:
        """What a restart needs of a dynamic one; empty for others."""
        return {name: getattr(self._scaler, name) for name in _SEARCH} if self.is_dynamic else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """The inverse of `state`; what is not in it stays."""
        if self.is_dynamic:
            for name in _SEARCH & state.keys():
                setattr(self._scaler, name, state[name])
