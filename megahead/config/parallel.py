"""How a model is cut over ranks."""

from __future__ import annotations

from pydantic import Field

from megahead.config.base import Settings
from megahead.config.model import ModelConfig
from megahead.errors import ConfigError


class ParallelConfig(Settings):
    """The mesh: `tensor` ranks share one copy of the weights; all ranks / tensor of them share each batch."""

    tensor: int = Field(default=1, gt=0)
    """Ranks that split every layer among them; keep it within a node."""

    sequence: bool = False
    """Also split the tokens of each row over the tensor ranks where layers are not split (norms, dropout, what each
    block is given): less memory for activations, the same traffic. Changes nothing at `tensor: 1`."""

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
        if remainder or not ranks:
            raise ConfigError("parallel.tensor", f"divide the number of ranks ({world_size})", got=self.tensor)
        return ranks
