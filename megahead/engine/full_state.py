"""All of an engine's state by name, as full (unsharded) tensors: the same at any ZeRO stage and on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from megahead.distributed import Group
from megahead.engine.state import MOMENTS, WEIGHT, ParameterStates
from megahead.errors import CheckpointError


class FullState:
    """Weights, and what the optimizer keeps beside them. All but `replicated` is collective."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        moments: Mapping[Tensor, Sequence[str]],
        states: ParameterStates,
        shard_dims: Mapping[str, int],
        tensor_group: Group,
        device: torch.device,
    ) -> None:
        """`moments`: which ones each trained parameter has; `shard_dims`: along which dimension a parameter is split
        over `tensor_group`, if it is."""
        self._parameters, self._moments, self._states = parameters, moments, states
        self._shard_dims, self._tensor_group, self._device = shard_dims, tensor_group, device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each as `KIND/NAME`, in fp32; one is in memory at a time."""
        for kind in (WEIGHT, *MOMENTS):
            for name, parameter in self._with(kind):
                part, dim = self._states.get(parameter, kind), self._shard_dims.get(name)
                full = part if dim is None else self._tensor_group.unshard(part, dim)
                yield f"{kind}/{name}", full.detach().float()

    def set(self, kind: str, read: Callable[[str], Tensor]) -> None:
        """Sets all of a kind to what `read` returns; CheckpointError for another shape."""
        for name, parameter in self._with(kind):
            full, dim = read(f"{kind}/{name}"), self._shard_dims.get(name)
            part = full if dim is None else self._tensor_group.shard(full, dim)
            shape = getattr(parameter, "ds_shape", parameter.shape)  # at stage 3 the parameter itself is empty
            if part.shape != shape:
                raise CheckpointError(
                    f"the checkpoint's {kind}/{name} must have the model's shape {tuple(shape)}, but has "
                    f"{tuple(part.shape)} instead; give `model` the sizes of that run."
                )
            self._states.set(parameter, kind, part.to(self._device))

    def replicated(self) -> dict[str, Tensor]:
        """This rank's weights as the forward pass uses them; at stage 3 they are empty."""
        return {name: weight.data for name, weight in self._with(WEIGHT)}

    def _with(self, kind: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._parameters.items():
            if kind == WEIGHT or kind in self._moments.get(parameter, ()):
                yield name, parameter
