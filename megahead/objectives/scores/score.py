"""What a score is to the softmax over candidates.

N outputs, D features, U candidates, E features of what is multiplied; n, w: some of the outputs and of the candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

DividesOutputs = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Score(ABC):
    """`scale * link(outputs(h) . rows(e))`."""

    temperature: float | DividesOutputs = 1.0
    """Scores are divided by it; a learned one divides what is made of outputs."""

    is_product: ClassVar[bool] = True
    """Whether the link changes nothing."""

    @property
    def scale(self) -> float:
        """Factor of the linked products."""
        return 1 / self.temperature if isinstance(self.temperature, float | int) else 1.0

    def outputs(self, outputs_ND: Tensor) -> Tensor:
        """[N, E]: what products read of the outputs; with a gradient."""
        return outputs_ND if isinstance(self.temperature, float | int) else self.temperature(outputs_ND)

    def rows(self, rows_UD: Tensor) -> Tensor:
        """[U, E]: what products read of the candidates' rows; with a gradient."""
        return rows_UD

    def link_(self, products_nw: Tensor) -> Tensor | None:
        """Puts the linked products in place of the products; their slopes by these, or None for ones."""
        return None

    @abstractmethod
    def written_out(self, outputs_ND: Tensor, rows_UD: Tensor) -> Tensor:
        """[N, U]: the scores by their definition, for a fixed temperature; the reference."""
