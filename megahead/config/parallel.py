"""How a model is split over ranks."""

from __future__ import annotations

from pydantic import Field

from megahead.config.base import Settings
from megahead.config.model import ModelConfig
from megahead.errors import ConfigError


class ParallelConfig(Settings):
    """The mesh: a copy of the weights is split over `tensor` ranks, a batch over the copies (the data ranks)."""

    tensor: int = Field(default=1, gt=0)
    """Tensor-parallel ranks, which split every layer among them; keep them within a node."""

    sequence: bool = False
    """Sequence parallelism as in Megatron: where layers are not split (norms, dropout, the inputs of blocks), split the
    tokens of each row over the tensor ranks. Less memory for activations, the same traffic; no effect with `tensor: 1`.
    """

    elastic: bool = False
    """Train on as many of the launcher's ranks as the batch can be split over, whose number may change whenever ranks
    meet again: global batch, objective and curve stay. Ranks beyond wait until the others end. It is torchrun's agents
    that start lost nodes' work again (docs/nodes.md); under other launchers the next start takes what is there."""

    def check(self, model: ModelConfig, sequence_length: int) -> None:
        """Raises ConfigError when `model`, or its rows, cannot be split evenly."""
        widths = {
            "num_heads": model.num_heads,
            "intermediate_size": model.mlp_size(),
            "padded vocabulary": model.padded_vocab_size(),
        }
        for name, width in widths.items():
            if width % self.tensor:
                raise ConfigError("parallel.tensor", f"divide the model's {name} ({width})", got=self.tensor)
        keys = model.key_heads()
        if keys % self.tensor and self.tensor % keys:
            rule = f"divide the model's num_key_heads ({keys}), or be a multiple of it"
            raise ConfigError("parallel.tensor", rule, got=self.tensor)
        if self.sequence and sequence_length % self.tensor:
            raise ConfigError(
                "data.sequence_length",
                f"be a multiple of parallel.tensor ({self.tensor}) under parallel.sequence",
                got=sequence_length,
            )

    def data_ranks(self, world_size: int) -> int:
        """Data-parallel ranks among `world_size` ranks."""
        ranks, remainder = divmod(world_size, self.tensor)
        if remainder or ranks < 1:
            raise ConfigError("parallel.tensor", f"divide the number of ranks ({world_size})", got=self.tensor)
        return ranks
