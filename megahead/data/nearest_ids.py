"""A file of each id's nearest other ids, by which similar words are masked with, and hard negatives chosen.

int32 [V, K], a `.npy` of numpy, the nearest first; `megahead nearest-ids` makes one of a model's input embedding. It is
read once and stays what it is over a run, so that what is drawn by it depends on the seed and the sample alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megahead.data.array_file import open_array
from megahead.errors import ConfigError, DataError
from megahead.files import staged

Array = np.ndarray[Any, Any]


def open_nearest_ids(path: str, vocab_size: int, wanted: int = 1) -> Array:
    """int64 [V, K]; ConfigError unless it is such a file for so many ids, with as many nearest ones of each as
    `objective.nearest` wants. A URL's is fetched first."""
    nearest_VK = open_array("data.nearest_ids", "name a file of megahead nearest-ids", path)
    if nearest_VK.ndim != 2 or nearest_VK.dtype.kind not in "iu" or not nearest_VK.size:
        raise ConfigError("data.nearest_ids", "hold a table of ids", got=f"{nearest_VK.dtype} {nearest_VK.shape}")
    if len(nearest_VK) > vocab_size or nearest_VK.min() < 0 or nearest_VK.max() >= vocab_size:
        got = f"{len(nearest_VK)} rows with ids up to {nearest_VK.max()}"
        raise ConfigError("data.nearest_ids", f"be of at most model.vocab_size ({vocab_size}) ids", got=got)
    if nearest_VK.shape[1] < wanted:
        rule = f"be at most the number of nearest ids in {path} ({nearest_VK.shape[1]})"
        raise ConfigError(
            "objective.nearest", rule, got=wanted, hint=f"make one of more: megahead nearest-ids --each {wanted}"
        )
    nearest_VK = nearest_VK.astype(np.int64)
    if (nearest_VK == np.arange(len(nearest_VK))[:, None]).any() or (np.diff(np.sort(nearest_VK)) == 0).any():
        raise ConfigError("data.nearest_ids", "name other ids, each once, for each id", got=path)
    missing = vocab_size - len(nearest_VK)  # ids that only the model has, such as a mask token: never targets
    return np.pad(nearest_VK, ((0, missing), (0, 0)), mode="wrap") if missing else nearest_VK


def find_nearest_ids(weight_VD: Array, each: int) -> Array:
    """int32 [V, K]: the `each` other rows with the largest cosines.

    Costs V^2 D products, some rows at a time; DataError where there are not so many.
    """
    weight_VD = np.asarray(weight_VD, np.float32)
    size = len(weight_VD)
    if size <= each:
        raise DataError(f"a model must have more than {each} ids for so many nearest ones, but has {size}.")
    unit_VD = weight_VD / np.maximum(np.linalg.norm(weight_VD, axis=1, keepdims=True), 1e-12)
    found, step = [], max(1, (1 << 24) // size)
    for first in range(0, size, step):
        cosines_bV = unit_VD[first : first + step] @ unit_VD.T
        own_b = np.arange(len(cosines_bV))
        cosines_bV[own_b, first + own_b] = -np.inf
        some_bK = np.argpartition(-cosines_bV, each - 1, axis=1)[:, :each]
        order_bK = np.argsort(-np.take_along_axis(cosines_bV, some_bK, 1), axis=1, kind="stable")
        found.append(np.take_along_axis(some_bK, order_bK, 1))
    return np.concatenate(found).astype(np.int32)


def save_nearest_ids(path: Path, nearest_VK: Array) -> None:
    """Writes the file under exactly this name, whole or not at all."""
    with staged(path) as partial, partial.open("wb") as file:
        np.save(file, nearest_VK)
