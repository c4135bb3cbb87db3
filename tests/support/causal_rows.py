"""Next-token batches of rows, as a decoder reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megahead.config.data import DataConfig
from megahead.data.batch import Batch, CausalCollator


def causal_batch(rows: np.ndarray, **settings: Any) -> Batch:
    data = DataConfig(train="text", sequence_length=rows.shape[1] - 1, **settings)
    return CausalCollator(data).batch(rows, range(len(rows)))
