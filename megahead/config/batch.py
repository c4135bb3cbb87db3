"""Global batch, micro-batch and accumulation steps: the only place where one is derived from the others."""

from __future__ import annotations

from pydantic import Field

from megahead.config.base import Settings
from megahead.errors import ConfigError


class BatchConfig(Settings):
    """How many samples one optimizer step reads, and how they are split into micro-batches."""

    global_size: int = Field(gt=0, le=2**24)
    """Samples per optimizer step, over all data-parallel ranks."""

    micro_size: int = Field(gt=0)
    """Samples per forward pass on one rank; lower it when memory runs out."""

    def accumulation_steps(self, data_ranks: int) -> int:
        """Forward-backward passes per optimizer step on each of `data_ranks` ranks."""
        per_pass = self.micro_size * data_ranks
        steps, remainder = divmod(self.global_size, per_pass)
        if steps == 0 or remainder:
            below, above = steps * per_pass, (steps + 1) * per_pass
            raise ConfigError(
                "batch.global_size",
                f"be a multiple of micro_size x data ranks ({self.micro_size} x {data_ranks})",
                got=self.global_size,
                hint=f"try {above}" if below == 0 else f"try {below} or {above}",
            )
        return steps

    def most_data_ranks(self, there: int) -> int:
        """The largest number of data ranks up to `there` that the global batch can be split over; 0: none can."""
        micro_batches, remainder = divmod(self.global_size, self.micro_size)
        return 0 if remainder else max((d for d in range(1, there + 1) if micro_batches % d == 0), default=0)
