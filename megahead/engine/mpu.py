"""The mesh in the form that DeepSpeed takes, Megatron's "model parallel unit" (mpu)."""

from __future__ import annotations

import torch.distributed as dist

from megahead.distributed import Mesh


class ModelParallelUnit:
    """Tells DeepSpeed which ranks split the weights (model, tensor) and which split each batch (data).

    With it DeepSpeed averages gradients over data ranks only. For the gradient norm it sums squares over tensor ranks
    for parameters that carry `model_parallel = True`; all others count once.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_model_parallel_rank(self) -> int:
        return self._mesh.tensor_group.rank

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.tensor_group.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._mesh.tensor_group.handle

    def get_data_parallel_rank(self) -> int:
        return self._mesh.data_group.rank

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.data_group.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._mesh.data_group.handle

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group
